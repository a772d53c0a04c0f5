"""FedSLR on the digits: which models are evaluated, how many numbers they take, who wins."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, Dirichlet
from models import MLP
from pfl.algorithms import FedSLR
from pfl.models.cnn import SmallCNN
from tests.algorithms import reference
from tests.problems import History, run


def score(network, w, digits, i):
    """Accuracy and loss of the model w on one client's test samples, with plain PyTorch."""
    model = copy.deepcopy(network)
    nn.utils.vector_to_parameters(w, model.parameters())
    inputs, targets = digits.samples.gather(torch.from_numpy(digits.partition.test[i]))
    with torch.no_grad():
        outputs = model.eval()(inputs.to(w.dtype))
    loss = nn.functional.cross_entropy(outputs, targets).item()
    return (outputs.argmax(1) == targets).double().mean().item(), loss


@pytest.fixture(scope="module", params=["MLP", "CNN"])
def trained(request, tmp_path_factory):
    """Three rounds of 3 of 8 clients."""
    torch.manual_seed(0)
    network = MLP(64, (12,)) if request.param == "MLP" else SmallCNN(width=4)
    digits, history = DigitsDataModule(num_clients=8, partition=Dirichlet(0.3)), History()
    algorithm = FedSLR(
        network, proximal_step=1.0, low_rank_penalty=0.2, sparse_penalty=0.02, lr=0.2, batch_size=16
    )
    arguments = dict(root=tmp_path_factory.mktemp("run"), callbacks=[history], clients_per_round=3)
    run(algorithm, digits, 3, evaluate=("test",), **arguments)
    return algorithm, digits, history


def test_the_newest_global_model_is_evaluated_everywhere(trained):
    """GKR is w_{t+1}; mixed is w_{t+1} + p_i, also for clients that did not take part."""
    algorithm, digits, history = trained
    assert np.abs(history["w"][-1] - history["w"][-2]).max() > 0.01  # the last round moved it
    last = history.participants()[-1]
    p = algorithm.store.read("p", np.arange(8))
    before = [i for i in range(8) if i not in last and p[i].any()]
    assert before  # somebody took part only earlier, and has a component from then
    assert any(not row.any() for row in p)  # and somebody never did
    w, scores = algorithm.global_model, algorithm.evaluation.scores
    for kind, models in (("global", w.expand(8, -1)), ("personalized", w + p)):
        expected = np.array([score(algorithm.network, models[i], digits, i) for i in range(8)])
        for name, values in zip(("accuracy", "loss"), expected.T, strict=True):
            np.testing.assert_allclose(scores["test", kind][name], values, rtol=0, atol=1e-10)
            logged = float(algorithm.trainer.callback_metrics[f"test/{kind}/{name}"])
            assert logged == pytest.approx(values.mean(), rel=1e-6)
    gap = scores["test", "global"]["loss"] - scores["test", "personalized"]["loss"]
    np.testing.assert_array_equal(np.abs(gap) > 1e-6, p.any(1))


def test_the_rows_have_the_numbers_of_parameters(trained):
    """GKR: factors where smaller; mixed: that and the non-zeros of p_i, averaged over clients."""
    algorithm, _, history = trained
    shapes = [tuple(p.shape) for p in algorithm.network.parameters()]
    w, p = history["w"][-1], history["p"][-1]
    ranks = reference.ranks(w, shapes)
    full = [min(m.shape) for m in reference.matrices(w, shapes)]
    assert history["ranks"][-1].tolist() == ranks
    assert any(0 < r < f for r, f in zip(ranks, full, strict=True))
    count = reference.factor_floats(w, shapes)
    assert count < algorithm.space.size
    metrics = algorithm.trainer.callback_metrics
    assert algorithm.parameters_global() == count
    assert float(metrics["parameters/global"]) == count
    mixed = count + np.count_nonzero(p, axis=1)
    assert 0 < mixed.mean() - count < algorithm.space.size
    assert float(metrics["parameters/personalized"]) == pytest.approx(mixed.mean(), rel=1e-6)


def test_numbers_of_low_rank_components(watch):
    """LR+LR: a component costs its factors, and its biases whole."""
    torch.manual_seed(0)
    digits = DigitsDataModule(num_clients=4, partition=Dirichlet(0.3))
    arguments = dict(proximal_step=1.0, low_rank_penalty=0.03, sparse_penalty=0.1, lr=0.2)
    algorithm = FedSLR(MLP(64, (12,)), personal_component="low_rank", **arguments)
    history = watch(algorithm, digits, 2, trace=[[0, 1], [1, 2]], evaluate=("test",))
    shapes = [tuple(p.shape) for p in algorithm.network.parameters()]
    count = reference.factor_floats(history["w"][-1], shapes)
    own = [reference.factor_floats(p, shapes) for p in history["p"][-1]]
    assert own[3] == 12 + 10  # never sampled: zero matrices, and the biases
    assert own[3] < min(own[:3]) < algorithm.space.size
    actual = float(algorithm.trainer.callback_metrics["parameters/personalized"])
    assert actual == pytest.approx(count + np.mean(own), rel=1e-6)
    assert algorithm.row["personal/loss"] != algorithm.row["train/loss"]  # each phase has its own


def test_components_help_on_skewed_digits(fit):
    """20 clients, Dirichlet(0.1): most have two or three classes, which one model cannot know."""
    torch.manual_seed(0)
    algorithm = FedSLR(MLP(64, (32,)), proximal_step=1.0, lr=0.1, batch_size=16, local_epochs=2)
    digits = DigitsDataModule(num_clients=20, partition=Dirichlet(0.1))
    fit(algorithm, digits, 10, precision="32-true", clients_per_round=10, evaluate=("test",))
    metrics = algorithm.trainer.callback_metrics
    mixed, shared = (float(metrics[f"test/{kind}/accuracy"]) for kind in ("personalized", "global"))
    assert mixed > shared + 0.02
    assert mixed > 0.8
