"""Sample gradients: the oracle counts them, whatever a method logs."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import SharedTest
from pfl.algorithms import Ditto, FedAvg, FedBABU
from tests.problems import owned, run

SIZES = [5, 3, 2]
EPOCHS = 2
ROUNDS = 3
OF_ONE_MODEL = ROUNDS * EPOCHS * sum(SIZES)  # sample gradients of local training


class TwoModels(FedAvg):
    """A method that takes two gradients in a local step and logs the loss of one."""

    logged = True

    def client_update(self, clients, w):
        v = w.repeat(len(clients), 1)
        own = v.clone()
        for batch in clients.batches(self.local_schedule):
            loss, g = self.oracle.gradient(v, batch, clients.buffers)
            _, h = self.oracle.gradient(own, batch, clients.buffers)
            rows = slice(0, batch.clients)
            v[rows] -= self.lr * (g + 0.1 * (v - own))[rows]
            own[rows] -= self.lr * (h + 0.1 * (own - v))[rows]
            if self.logged:
                self.log_loss("train", loss, batch.counts)
        return v


class LogsNothing(TwoModels):
    """The same without a logged loss."""

    logged = False


class LastIsUnused(TwoModels):
    """A method that does not use the gradients of the last client, and does not count them."""

    def client_update(self, clients, w):
        v = w.repeat(len(clients), 1)
        for batch in clients.batches(self.local_schedule):
            used = [0 if c == 2 else n for c, n in zip(clients.ids, batch.counts, strict=False)]
            _, g = self.oracle.gradient(v, batch, clients.buffers, counted=used)
            v -= self.lr * g
        return v


@pytest.fixture
def counted(tmp_path, threads):
    """Trains a method and returns its number of sample gradients and its row."""

    def counted(kind, number=1, network=None, **loop):
        threads(number)
        torch.manual_seed(0)
        inputs = torch.randn(sum(SIZES) + 4, 6)
        targets = torch.randint(3, (len(inputs),))
        n = sum(SIZES)
        data = owned(
            np.repeat([0, 1, 2], SIZES),
            *(inputs[:n], targets[:n], inputs[n:], targets[n:]),
            protocol=SharedTest(0.0),
        )
        network = network or nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        method = kind(network, local_epochs=EPOCHS, batch_size=2)
        run(method, data, ROUNDS, root=tmp_path, precision="32-true", **loop)
        assert method.row["train/samples"] == method.progress.samples
        return method.progress.samples, method.row

    return counted


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("kind", "gradients"),
    [
        (FedAvg, OF_ONE_MODEL),
        (partial(Ditto, personal_epochs=EPOCHS), 2 * OF_ONE_MODEL),
        (TwoModels, 2 * OF_ONE_MODEL),
        (LogsNothing, 2 * OF_ONE_MODEL),
        (LastIsUnused, ROUNDS * EPOCHS * sum(SIZES[:2])),
    ],
)
def test_every_gradient_of_a_local_step_is_counted(counted, kind, gradients, number):
    assert counted(kind, number)[0] == gradients


def test_what_is_not_logged_has_no_loss(counted):
    assert "train/loss" in counted(TwoModels)[1]
    assert "train/loss" not in counted(LogsNothing)[1]


def test_gradients_for_an_evaluation_are_not_counted(counted):
    """FedBABU's clients train its network anew for each evaluation of their models."""
    samples, row = counted(FedBABU, 2)
    assert samples == OF_ONE_MODEL
    assert "adapt/loss" not in row


def test_gradients_of_clients_whose_messages_are_lost_are_counted(counted):
    """They were spent."""
    samples, row = counted(TwoModels, dropout=0.5)
    assert row["dropped"] > 0
    assert samples == 2 * OF_ONE_MODEL
