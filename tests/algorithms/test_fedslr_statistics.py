"""FedSLR with BatchNorm: Phase I's statistics travel, Phase II's stay with the personal model."""

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, Dirichlet, SharedTest, TensorDataModule
from pfl.algorithms import FedSLR
from pfl.datamodules.rules.partitioner import Partitioner
from tests.problems import History

LR, PERSONAL_STEPS = 0.1, 3


def normalized(seed=0):
    torch.manual_seed(seed)
    layers = (nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    return nn.Sequential(nn.Flatten(), *layers).double()


def fedslr(personal_epochs=PERSONAL_STEPS, **kwargs):
    penalties = dict(low_rank_penalty=0.0, sparse_penalty=0.0, proximal_step=1.0)
    steps = dict(lr=LR, local_steps=2, batch_size=None, personal_epochs=personal_epochs)
    return FedSLR(normalized(), **penalties, **steps, **kwargs)


@pytest.fixture(scope="module")
def digits():
    return DigitsDataModule(num_clients=3, partition=Dirichlet(1.0))


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_phase_two_does_not_touch_the_global_model(fit, digits, buffers):
    """With one personal epoch and with five: the same models, statistics and scores, bit by bit."""
    one, five = (fit(fedslr(epochs, buffers=buffers), digits, 3) for epochs in (1, 5))
    for (name, expected), actual in zip(
        one.network.state_dict().items(), five.network.state_dict().values(), strict=True
    ):
        assert torch.equal(actual, expected), name
    scores = [run.evaluation.scores["test", "global"]["loss"] for run in (one, five)]
    np.testing.assert_array_equal(*scores)


def phase_two(network, w, digits, client):
    """Plain SGD from w with full gradients; it moves the network's statistics as well."""
    inputs, targets = digits.samples.gather(torch.from_numpy(digits.partition.train[client]))
    nn.utils.vector_to_parameters(torch.as_tensor(w), network.parameters())
    optimizer = torch.optim.SGD(network.train().parameters(), lr=LR)
    for _ in range(PERSONAL_STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs.double()), targets).backward()
        optimizer.step()


def loss_of(network, digits, client):
    inputs, targets = digits.samples.gather(torch.from_numpy(digits.partition.test[client]))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(network.eval()(inputs.double()), targets))


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_the_personal_model_is_scored_with_the_statistics_that_its_client_keeps(
    fit, digits, buffers
):
    """Of Phase II alone, from round to round. Who never took part has the global model and its
    statistics."""
    history, trace = History(), [[0, 1], [0]]
    algorithm = fit(fedslr(buffers=buffers), digits, len(trace), callbacks=[history], trace=trace)
    networks = [normalized(), normalized()]
    received = [nn.utils.parameters_to_vector(networks[0].parameters()).detach(), history["w"][0]]
    for round_index, cohort in enumerate(trace):
        for i in cohort:
            p = history["p"][round_index - 1, i] if round_index else 0.0
            phase_two(networks[i], received[round_index] + p, digits, i)
    kept = algorithm.store.read("personal_buffers", np.arange(3))
    scores = algorithm.evaluation.scores
    for i, network in enumerate(networks):
        expected = torch.cat([b.reshape(-1).double() for b in network.buffers()])
        torch.testing.assert_close(kept[i], expected, rtol=0, atol=1e-12)
        w_i = torch.as_tensor(history["w"][-1] + history["p"][-1, i])
        nn.utils.vector_to_parameters(w_i, network.parameters())
        actual = scores["test", "personalized"]["loss"][i]
        assert actual == pytest.approx(loss_of(network, digits, i), rel=1e-9)
    assert kept[2].isnan().all()
    assert scores["test", "personalized"]["loss"][2] == pytest.approx(
        scores["test", "global"]["loss"][2], rel=1e-12
    )


def test_predictions_are_those_of_the_scored_models(fit, digits):
    algorithm = fit(fedslr(buffers="average"), digits, 2)
    rows = algorithm.trainer.predict(algorithm, datamodule=algorithm.trainer.datamodule)
    right = np.concatenate([chunk["personalized"] == chunk["target"] for chunk in rows])
    clients = np.concatenate([chunk["client"] for chunk in rows])
    accuracies = [right[clients == i].mean() for i in range(3)]
    expected = algorithm.evaluation.scores["test", "personalized"]["accuracy"]
    np.testing.assert_allclose(accuracies, expected, rtol=1e-12)


class LastWithout(Partitioner):
    """All clients but the last have samples."""

    def owners(self, targets, num_clients, rng):
        return np.arange(len(targets)) % (num_clients - 1)

    def describe(self):
        return "no samples for the last client"


def test_a_client_without_samples_keeps_no_statistics(fit, digits):
    """Its personalized model is the global model with the newest statistics."""
    inputs, targets = digits.samples.gather(torch.arange(60))
    protocol = SharedTest(validation=0.0)
    data = TensorDataModule(
        inputs, targets, inputs, targets, num_clients=3, partition=LastWithout(), protocol=protocol
    )
    algorithm = fit(fedslr(), data, 2)
    assert data.client_sizes.tolist() == [30, 30, 0]
    kept = algorithm.store.read("personal_buffers", np.arange(3))
    assert kept.isnan().all(1).tolist() == [False, False, True]
    w, w_i = (algorithm.evaluation.scores["test", k]["loss"] for k in ("global", "personalized"))
    assert w_i[2] == pytest.approx(w[2], rel=1e-12)
