"""A model or state that is not finite ends the run, in its own round, with its name."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import ArrayDataModule
from models import MLP, HalfSquaredError
from pfl.algorithms import FedAvg, LocalTrain
from pfl.clients import ClientData, Clients
from pfl.errors import Diverged
from pfl.method import round_totals
from pfl.method.log import Log
from pfl.method.round_totals import RoundTotals, not_finite
from pfl.stages.mean import WeightedMean
from tests.algorithms.methods import EVERY_METHOD, small_network, small_world
from tests.problems import scalar_problem

PROBLEM = scalar_problem([2.0, 4.0])  # a gradient step of 0.5 at w goes to w - (w - 3) / 2
STEP = dict(lr=0.5, local_steps=1, batch_size=None, loss=HalfSquaredError())


class NotANumber(nn.Module):
    """A loss whose gradients are NaN."""

    def forward(self, outputs, targets):
        loss = outputs.square().sum(1)
        return loss + (loss - loss.detach()).abs().sqrt()  # the derivative: inf * 0


@EVERY_METHOD
def test_models_of_the_only_round(fit, method):
    algorithm = method.make(small_network(), loss=NotANumber(), lr=0.2, batch_size=None)
    with pytest.raises(Diverged, match=r"the client.* in round 1\b"):
        fit(algorithm, small_world(classes=method.classes), 1, evaluate=())


def test_a_global_model_of_the_last_round(fit):
    """w_1 = 1e30 * 3 / 2. The clients halve the distance to 3: their mean is finite, but
    w_2 = w_1 - 1e30 * w_1 / 2 is beyond the numbers of float32, which end at 3.4e38."""
    server = partial(torch.optim.SGD, lr=1e30)
    algorithm = FedAvg(PROBLEM.network(0.0).float(), server_optimizer=server, **STEP)
    with pytest.raises(Diverged, match=r"the server's global_model .* round 2\b"):
        fit(algorithm, PROBLEM, 2, precision="32-true")


def test_a_server_optimizer_that_would_never_move_again(fit):
    """The gradient 1e200 / 2 has the infinite square by which Adam divides: w stays as it is."""
    server = partial(torch.optim.Adam, lr=0.1)
    algorithm = FedAvg(PROBLEM.network(1e200), server_optimizer=server, **STEP)
    with pytest.raises(Diverged, match=r"the server's exp_avg_sq .* round 1\b"):
        fit(algorithm, PROBLEM, 1)


class Sums(FedAvg):
    """Adds 1e308 to a server state in every round."""

    def __init__(self, network, **kwargs):
        super().__init__(network, **kwargs)
        self.add_server_state("total", torch.tensor(0.0, dtype=torch.float64))

    def server_update(self, mean):
        super().server_update(mean)
        self.total += 1e308


def test_a_server_state(fit):
    """2e308 is above the largest number, 1.8e308."""
    where = r"server_update of Sums gave values that are not finite in round 2: self.total$"
    with pytest.raises(Diverged, match=where):
        fit(Sums(PROBLEM.network(0.0), **STEP), PROBLEM, 2)


class Sets(FedAvg):
    """Sets the global model in `server_update`."""

    def server_update(self, mean):
        self.global_model.copy_(mean["w"] / 0)


class Leaves(FedAvg):
    """Leaves a gradient for the server's optimizer."""

    def server_update(self, mean):
        self.space.vector.grad = mean["w"] * torch.nan


@pytest.mark.parametrize(
    ("kind", "what"), [(Sets, "self.global_model"), (Leaves, "self.space.vector.grad")]
)
def test_a_server_update_is_told_under_its_name(fit, kind, what):
    where = rf"server_update of {kind.__name__} gave values .* not finite in round 1: {what}$"
    with pytest.raises(Diverged, match=where):
        fit(kind(PROBLEM.network(1.0), **STEP), PROBLEM, 1)


@pytest.mark.parametrize(("dtype", "overflows"), [("float16", True), ("bfloat16", False)])
def test_a_client_state_is_checked_as_it_is_stored(fit, dtype, overflows):
    """The optimum 1e6 is above the largest number of float16, 65504."""
    problem = scalar_problem([1e6])
    run = partial(fit, LocalTrain(problem.network(0.0), **STEP), problem, 1, state_dtype=dtype)
    if not overflows:
        assert run().store.read("w", np.arange(1)).isfinite().all()
        return
    with pytest.raises(Diverged, match=r"client state w .* round 1\b"):
        run()


def test_the_states_of_another_process_end_the_run_in_this_one(monkeypatch):
    totals = RoundTotals(WeightedMean("uniform"), (), torch.zeros(1), np.array([0]), [])
    data = small_world()
    data.setup()
    clients = Clients(np.array([0]), 0, ClientData(data))
    clients.state = {"own": torch.tensor([[1.0, torch.inf]]), "p": torch.zeros(1, 2)}
    totals.add(clients, totals.read(clients, {}), 0, 0, Log())
    monkeypatch.setattr(
        round_totals, "gather", lambda own: [own, replace(own, not_finite={"others"})]
    )
    totals.reduce()
    assert totals.not_finite == {"own", "others"}


def test_large_and_missing_values_are_finite():
    """The sum of the first two values is not finite, but every value is."""
    finite = {"sum": torch.tensor([3e38, 3e38]), "none": torch.zeros(0), "bool": torch.tensor(True)}
    bad = {"NaN": torch.tensor([0.0, torch.nan, 1.0]), "-inf": torch.tensor(-torch.inf)}
    assert not_finite({**finite, **bad}) == set(bad)


class Spoiled(FedAvg):
    """FedAvg in which client 1 sends what is not finite, in the second round."""

    def client_update(self, clients, w):
        v = super().client_update(clients, w)
        v[torch.from_numpy(clients.ids == 1)] /= clients.round == 0
        return v


@pytest.mark.parametrize(
    ("at_once", "engine", "named"),
    [
        (1, "sequential", "of client 1 is"),
        (4, "sequential", "of client 1 is"),
        (2, "vmap", "of client 0, client 1"),  # these two train together: 5 and 4 samples first
    ],
)
def test_the_client_is_named(fit, at_once, engine, named):
    algorithm = Spoiled(small_network(), loss=HalfSquaredError(), lr=0.1, engine=engine)
    loop = dict(clients_at_once=at_once, evaluate=(), trace=[[0, 1, 2], [0, 1]])
    with pytest.raises(Diverged, match=rf"the clients' message w {named}.* in round 2;"):
        fit(algorithm, small_world(), 2, **loop)


def test_a_client_with_a_state_that_is_not_finite_is_named(fit):
    class Keeps(LocalTrain):
        def client_update(self, clients, w):
            sent = super().client_update(clients, w)
            clients.state["w"][torch.from_numpy(clients.ids == 2)] = torch.inf
            return sent

    algorithm = Keeps(small_network(), loss=HalfSquaredError(), lr=0.1, engine="sequential")
    with pytest.raises(Diverged, match=r"the client state w of client 2 is no longer finite"):
        fit(algorithm, small_world(), 1, evaluate=())


def test_a_wide_network_diverges_and_its_line_has_a_rate_that_does_not(fit):
    """The curvature of a squared error grows with the width: 5 / 2048 is 0.002."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(60, 10)).astype(np.float32)
    targets = inputs @ rng.normal(size=10).astype(np.float32) / 3
    data = ArrayDataModule(inputs, targets, num_clients=3)
    network = MLP(10, (2048,), 1)
    with pytest.raises(Diverged, match=r"try model\.lr: 0\.002, or data\.scale_targets: true"):
        fit(FedAvg(copy.deepcopy(network), lr=0.1), data, 8, evaluate=(), precision="32-true")
    method = FedAvg(copy.deepcopy(network), lr=0.002)
    fit(method, data, 8, evaluate=("test",), precision="32-true")
    started = np.square(targets).mean()
    assert method.evaluation.scores["test", "global"]["loss"].mean() < 0.5 * started
