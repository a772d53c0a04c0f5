"""The debug engine: the same numbers, and errors that name client, round, epoch and step."""

import re
import threading

import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, SharedTest, Sizes, TensorDataModule
from models import MLP
from pfl.algorithms import FedAvg, FedSLR
from pfl.datamodules.rules.sample_values import Natural
from pfl.engines import DebugError
from pfl.method import LocalSchedule
from tests.networks import (
    NETWORKS,
    assert_gradient,
    counts_of,
    cross_entropy,
    labels,
    make,
    problem,
)
from tests.problems import run


@pytest.mark.parametrize("name", ["MLP", "SmallCNN", "tied", "unused and frozen"])
def test_gradients_are_those_of_plain_pytorch(name):
    build, shape, classes = NETWORKS[name]
    counts = counts_of(build)
    network, w, batch = problem(build, shape, labels(classes, counts), counts)
    oracle = make(network, batch.inputs[0], batch.targets[0], engine="debug", num_classes=classes)
    assert oracle.engine.name == "debug"
    assert_gradient(oracle, network, w, batch, cross_entropy)


@pytest.mark.parametrize("kind", [FedAvg, FedSLR])
def test_a_run_ends_where_the_sequential_engine_ends(tmp_path, kind):
    """Local steps by the default of `Engine` and those of the sequential engine: the same floats,
    and dropout draws the same numbers, since both key them by client and step."""
    ends = []
    for engine in ("sequential", "debug"):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10))
        method = kind(network, lr=0.1, engine=engine)
        data = DigitsDataModule(None, Sizes([60, 50, 40, 9]))
        ends.append(run(method, data, 2, root=tmp_path).global_model)
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-6)


def two_clients():
    """Client 0 has five samples, client 1 has three: with batches of two, three steps and two."""
    inputs, targets = torch.linspace(-1, 1, 8 * 6).view(8, 6), torch.arange(8) % 3
    owners = torch.tensor([0] * 5 + [1] * 3)
    return TensorDataModule(
        inputs, targets, inputs, targets, owners, partition=Natural(), protocol=SharedTest(0.0)
    )


def train(tmp_path, method, rounds=2):
    """Runs a method, and returns the message of the DebugError that ends the run."""
    with pytest.raises(DebugError) as caught:
        run(method, two_clients(), rounds, root=tmp_path)
    return str(caught.value)


SETTINGS = dict(lr=0.1, batch_size=2, local_epochs=2, engine="debug")


def test_an_error_in_client_update_names_client_and_round(tmp_path):
    class Faulty(FedAvg):
        def client_update(self, clients, w):
            if clients.round == 1 and clients.ids[0] == 1:
                return w @ w[:3]
            return super().client_update(clients, w)

    message = train(tmp_path, Faulty(MLP(6, (4,), 3), **SETTINGS))
    assert message.startswith("client 1 in round 2: RuntimeError: ")


def test_an_error_behind_a_step_names_epoch_and_step(tmp_path):
    """Client 0 takes 3 steps an epoch, so its fifth batch is the second step of epoch 2."""

    class Faulty(FedAvg):
        def client_update(self, clients, w):
            v, schedule = w.repeat(len(clients), 1), LocalSchedule(batch_size=2, epochs=2)
            for number, batch in enumerate(clients.batches(schedule), start=1):
                v -= 0.1 * self.oracle.gradient(v, batch)[1]
                if number == 5:
                    raise KeyError("lost")
            return v

    message = train(tmp_path, Faulty(MLP(6, (4,), 3), **SETTINGS))
    assert message.startswith("client 0 in round 1, epoch 2, step 2: KeyError: ")


class Logarithm(nn.Module):
    """log x, whose derivative is not finite at 0, and which has no real value below."""

    def forward(self, x):
        return torch.log(x)


def test_the_first_layer_whose_output_is_not_finite_is_named(tmp_path):
    network = nn.Sequential(nn.Linear(6, 4), Logarithm(), nn.Linear(4, 3))
    with torch.no_grad():
        network[0].weight.zero_()
        network[0].bias.fill_(-1.0)  # of which there is no logarithm
    # The network is tried with one batch before training, for which NaN is no error.
    message = train(tmp_path, FedAvg(network, **SETTINGS))
    place = "client 0 in round 1, epoch 1, step 1"
    assert message == f"{place}: the output of layer 1 (Logarithm) is not finite"


def test_a_gradient_that_is_not_finite_names_its_parameter(tmp_path):
    """sqrt at 0 has the value 0 and an infinite derivative."""

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(6))
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.scale.sqrt() + x)

    message = train(tmp_path, FedAvg(Root(), **SETTINGS))
    assert message == ("client 0 in round 1, epoch 1, step 1: the gradient of scale is not finite")


def test_a_model_that_the_method_s_own_arithmetic_spoils_is_found_at_the_next_step(tmp_path):
    class Faulty(FedAvg):
        def client_update(self, clients, w):
            return self.local_sgd(clients, w / (w - w))

    message = train(tmp_path, Faulty(MLP(6, (4,), 3), **SETTINGS))
    assert re.match(r"client 0 in round 1, epoch 1, step 1: the model .* is not finite", message)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda method, clients, w: w.add_(1.0), "`w`"),
        (lambda method, clients, w: clients.received["w"].add_(1.0), "`w`"),
        (lambda method, clients, w: clients.ids.__setitem__(0, 7), "`clients.ids`"),
    ],
    ids=["received model", "received message", "ids"],
)
def test_changes_in_place_that_would_leak_are_refused(tmp_path, change, name):
    class Leaking(FedAvg):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_server_state("total", torch.zeros(3))

        def client_update(self, clients, w):
            v = super().client_update(clients, w)
            change(self, clients, w)
            return v

    message = train(tmp_path, Leaking(MLP(6, (4,), 3), **SETTINGS))
    assert message.startswith("client 0 in round 1") and "in place" in message
    assert name in message


def test_one_client_trains_at_a_time_in_the_main_thread(tmp_path):
    groups = []

    class Watched(FedAvg):
        def client_update(self, clients, w):
            groups.append((len(clients), threading.current_thread() is threading.main_thread()))
            return super().client_update(clients, w)

    torch.set_num_threads(2)
    try:
        run(Watched(MLP(6, (4,), 3), **SETTINGS), two_clients(), 1, root=tmp_path)
    finally:
        torch.set_num_threads(1)
    # The first round trains each alone and both together, and compares, before it trains them.
    assert groups == [(1, True)] * 2 + [(2, True)] + [(1, True)] * 2
