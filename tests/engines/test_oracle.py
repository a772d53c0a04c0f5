"""The oracle: two engines, one meaning, and that of plain PyTorch, in training and evaluation."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from datamodules import TensorDataModule
from pfl.algorithms import FedAvg
from pfl.engines.batch import Batch, default_loss
from tests.networks import (
    COUNTS,
    NETWORKS,
    Functional,
    assert_gradient,
    counts_of,
    cross_entropy,
    labels,
    make,
    mlp,
    normalized,
    problem,
    put,
)
from tests.problems import run
from tests.refusal import refused

# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
@pytest.mark.parametrize(("build", "shape", "classes"), NETWORKS.values(), ids=NETWORKS)
def test_gradients_are_those_of_plain_pytorch(build, shape, classes, engine):
    counts = counts_of(build)
    network, w, batch = problem(build, shape, labels(classes, counts), counts)
    oracle = make(network, batch.inputs[0], batch.targets[0], engine=engine, num_classes=classes)
    assert oracle.engine.batched == (engine == "vmap")
    assert_gradient(oracle, network, w, batch, cross_entropy)


@pytest.mark.parametrize(("build", "shape", "classes"), NETWORKS.values(), ids=NETWORKS)
def test_engines_agree_in_float32(build, shape, classes):
    counts = counts_of(build)
    network, w, batch = problem(build, shape, labels(classes, counts), counts, torch.float32)
    (a, g), (b, h) = (
        make(network, batch.inputs[0], batch.targets[0], engine=e).gradient(w, batch)
        for e in ("sequential", "vmap")
    )
    assert a.dtype == g.dtype == b.dtype == h.dtype == torch.float32
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(g, h, rtol=1e-3, atol=1e-5)


def l1(outputs, targets):
    """Per sample and output: [n, k]."""
    return (outputs - targets).abs()


# loss given to the oracle, what it means for each sample, shape of a sample's target
LOSSES = {
    "default": (default_loss, lambda o, t: (o - t).square().mean(1), (3,)),
    "MSELoss": (nn.MSELoss(), lambda o, t: (o - t).square().mean(1), (3,)),
    "L1Loss": (nn.L1Loss(), lambda o, t: l1(o, t).mean(1), (3,)),
    "L1Loss sum": (nn.L1Loss(reduction="sum"), lambda o, t: l1(o, t).mean(1), (3,)),
    "function [n, k]": (l1, lambda o, t: l1(o, t).mean(1), (3,)),
    "function [n]": (lambda o, t: l1(o, t).sum(1), lambda o, t: l1(o, t).sum(1), (3,)),
    "partial": (
        partial(F.huber_loss, reduction="none", delta=0.3),
        lambda o, t: F.huber_loss(o, t, reduction="none", delta=0.3).mean(1),
        (3,),
    ),
    "smoothed": (
        nn.CrossEntropyLoss(label_smoothing=0.2),
        lambda o, t: F.cross_entropy(o, t, reduction="none", label_smoothing=0.2),
        None,
    ),
}


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
@pytest.mark.parametrize(("loss", "meaning", "target"), LOSSES.values(), ids=LOSSES)
def test_losses_are_per_sample_means(loss, meaning, target, engine):
    targets = labels(3) if target is None else torch.rand(4, 5, *target, dtype=torch.float64)
    network, w, batch = problem(mlp, (12,), targets)
    before = getattr(loss, "reduction", None)
    oracle = make(network, batch.inputs[0], batch.targets[0], loss, engine)
    assert_gradient(oracle, network, w, batch, meaning)
    assert getattr(loss, "reduction", None) == before  # the user's own object stays as it is


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_targets_of_several_labels_a_sample(engine):
    """[n, T] labels and [n, K, T] scores, as of a text model: the mean over T, then samples."""
    targets = torch.randint(3, (4, 5, 2))
    network, w, batch = problem(
        lambda: nn.Sequential(mlp(outputs=6), nn.Unflatten(1, (3, 2))), (12,), targets
    )
    oracle = make(network, batch.inputs[0], batch.targets[0], engine=engine, num_classes=3)
    assert_gradient(oracle, network, w, batch, lambda o, t: cross_entropy(o, t).mean(1))
    _, correct, _ = oracle.evaluate(w[:4], batch)
    assert set(correct.unique().tolist()) <= {0.0, 0.5, 1.0}
    outputs = put(network, w[0])(batch.inputs[0])
    expected = (outputs.argmax(1) == targets[0]).double().mean(1)
    torch.testing.assert_close(correct[0], expected)


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_a_loss_with_tensors_of_its_own_takes_the_precision(tmp_path, precision):
    x, y = torch.randn(12, 12), torch.arange(12) % 3
    weight = torch.tensor([1.0, 2.0, 0.5])
    algorithm = FedAvg(mlp(), loss=nn.CrossEntropyLoss(weight=weight))
    run(algorithm, TensorDataModule(x, y, num_clients=2), 1, root=tmp_path, precision=precision)
    assert np.isfinite(algorithm.row["train/loss"])


def test_default_loss_takes_outputs_of_one_value_a_sample():
    outputs, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 5.0])
    assert default_loss(outputs, targets).tolist() == [1, 4]
    assert default_loss(outputs, targets[:, None]).tolist() == [[1], [4]]


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_padding_has_no_influence(engine):
    network, w, batch = problem(mlp, (12,), labels(3))
    oracle = make(network, batch.inputs[0], batch.targets[0], engine=engine)
    loss, g = oracle.gradient(w, batch)
    scores = oracle.evaluate(w[:4], batch)[:2]
    for c, count in enumerate(batch.counts):
        batch.inputs[c, count:] = 1e6
        batch.targets[c, count:] = 2
    again, h = oracle.gradient(w, batch)
    assert torch.equal(loss, again)
    assert torch.equal(g, h)
    for a, b in zip(scores, oracle.evaluate(w[:4], batch)[:2], strict=True):
        assert torch.equal(a, b)


def test_sample_weights_sum_to_one_and_skip_padding():
    batch = Batch(torch.zeros(3, 4, 2), torch.zeros(3, 4), [4, 2, 1])
    expected = [[0.25] * 4, [0.5, 0.5, 0, 0], [1, 0, 0, 0]]
    assert batch.sample_weights(torch.float64).tolist() == expected
    assert batch.clients == 3


@pytest.mark.parametrize("training", [True, False])
def test_the_network_of_the_user_is_never_run_or_changed(training):
    """BatchNorm would show it: a forward pass in training mode moves its buffers."""
    network, w, batch = problem(normalized, (12,), labels(3, [5, 4]), [5, 4])
    network.train(training)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    oracle = make(network, batch.inputs[0], batch.targets[0])
    oracle.gradient(w, batch)
    oracle.evaluate(w[:2], batch)
    oracle.gradient(w, batch)
    assert network.training == training
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in network.parameters())


# ---- networks that vmap cannot run ---------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


@pytest.mark.parametrize("engine", ["sequential", "auto"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_have_the_gradients_of_plain_pytorch(kind, engine):
    """Whatever vmap does with them, `auto` gives the right gradient, and no warning."""
    network, w, batch = problem(lambda: Recurrent(kind), (6, 4), labels(3))
    oracle = make(network, batch.inputs[0], batch.targets[0], engine=engine)
    assert_gradient(oracle, network, w, batch, cross_entropy)


class Branching(nn.Sequential):
    """Python control flow that depends on the data, which vmap cannot trace."""

    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else 2 * y


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: mlp(nn.BatchNorm1d(8), nn.Softplus()), "running statistics"),
        (lambda: mlp(nn.Dropout(), nn.Softplus()), "random"),
        (Functional, "random"),
        (lambda: Branching(*mlp()), "data-dependent"),
    ],
    ids=["BatchNorm", "Dropout", "F.dropout", "control flow"],
)
def test_vmap_is_refused_where_it_cannot_run_and_auto_takes_the_sequential_engine(build, reason):
    network, _, batch = problem(build, (12,), labels(3))
    with refused("engine", "vmap", type(network).__name__, reason, "use sequential"):
        make(network, batch.inputs[0], batch.targets[0], engine="vmap")
    oracle = make(network, batch.inputs[0], batch.targets[0], engine="auto")
    assert oracle.engine.name == "sequential"


def gelu_after_convolution():
    return nn.Sequential(nn.Conv2d(2, 2, 8), nn.GELU(), nn.Flatten(), nn.Linear(2, 3))


@pytest.mark.parametrize(
    ("build", "shape", "engine", "batched"),
    [
        (lambda: mlp(nn.GELU()), (12,), "vmap", True),
        (gelu_after_convolution, (2, 8, 8), "sequential", False),
    ],
    ids=["no chain", "maps, no chain"],
)
def test_auto_takes_the_fastest_engine_that_works(build, shape, engine, batched):
    """On a CPU: no batches of convolutions."""
    network, _, batch = problem(build, shape, labels(3))
    chosen = make(network, batch.inputs[0], batch.targets[0], engine="auto").engine
    assert (chosen.name, chosen.batched) == (engine, batched)


# ---- evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
@pytest.mark.parametrize(("build", "shape", "classes"), NETWORKS.values(), ids=NETWORKS)
def test_scores_are_those_of_plain_pytorch(build, shape, classes, engine):
    counts = counts_of(build)
    network, w, batch = problem(build, shape, labels(classes, counts), counts)
    oracle = make(network, batch.inputs[0], batch.targets[0], engine=engine)
    losses, correct, _ = oracle.evaluate(w[:-1], batch)
    assert losses.shape == correct.shape == batch.targets.shape
    for c, count in enumerate(counts):
        alone = put(network, w[c]).eval()
        with torch.no_grad():
            outputs = alone(batch.inputs[c])
        expected = cross_entropy(outputs, batch.targets[c])
        hits = (outputs.argmax(1) == batch.targets[c]).double()
        torch.testing.assert_close(losses[c, :count], expected[:count])
        assert torch.equal(correct[c, :count], hits[:count])
        assert not losses[c, count:].any()
        assert not correct[c, count:].any()
        one, right, _ = oracle.evaluate_one(w[c], batch.inputs[c], batch.targets[c])
        torch.testing.assert_close(one, expected)
        assert torch.equal(right, hits)
        torch.testing.assert_close(oracle.predict(w[c], batch.inputs[c]), outputs)


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
@pytest.mark.parametrize("outputs", [3, 1])
def test_regression_has_no_accuracy(engine, outputs):
    targets = torch.rand(4, 5, *([outputs] if outputs > 1 else []), dtype=torch.float64)
    network, w, batch = problem(lambda: mlp(outputs=outputs), (12,), targets)
    oracle = make(network, batch.inputs[0], batch.targets[0], engine=engine)
    losses, correct, _ = oracle.evaluate(w[:4], batch)
    real = batch.sample_weights(torch.float32) > 0
    assert correct[real].isnan().all()
    assert not correct[~real].any()
    for c, count in enumerate(COUNTS):
        with torch.no_grad():
            y = put(network, w[c])(batch.inputs[c, :count]).view(targets[c, :count].shape)
        expected = (y - targets[c, :count]).square().view(count, -1).mean(1)
        torch.testing.assert_close(losses[c, :count], expected)
        one, right, _ = oracle.evaluate_one(w[c], batch.inputs[c, :count], targets[c, :count])
        torch.testing.assert_close(one, expected)
        assert right.isnan().all()
