"""Training aids of local steps: clipping, schedules, weights of classes; what differs by client.

Every expected value is a line of NumPy or a closed form.
"""

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import Given, Natural, Ragged, SplitOwn, TensorDataModule
from models import HalfSquaredError
from pfl.algorithms import (
    APFL,
    L2GD,
    LPGD,
    MOON,
    SCAFFOLD,
    FedAgg,
    FedAvg,
    FedCLUP,
    FedDBE,
    FedLC,
    FedNova,
    FedPD,
    FedProx,
    FedRep,
    FedRoD,
    Floco,
    GlobalTrain,
    PerFedAvg,
    pFedMe,
)
from pfl.clients.rates import Cosine, Decay, WarmUp
from pfl.errors import ConfigError
from pfl.method import Clients, FederatedAlgorithm
from tests.problems import Steps, least_squares, scalar_problem

FULL = dict(batch_size=None, loss=HalfSquaredError())
START = np.linspace(-1.0, 1.0, 8)
ENGINES = ["auto", "sequential", "vmap", "debug"]


def clip(g, limit):
    return g * min(1.0, limit / np.linalg.norm(g))


@pytest.mark.parametrize("engine", ["auto", "sequential", "vmap"])
def test_the_gradient_of_a_mini_batch_is_clipped_by_its_norm(watch, engine):
    """v <- v - η (clip(g) + λ v + μ (v - w)): neither decay nor the proximal term is clipped."""
    problem = least_squares((7, 2, 5, 3), bias=True)
    lr, decay, mu, limit = 0.1, 0.05, 0.4, 2.0
    settings = dict(lr=lr, weight_decay=decay, proximal_weight=mu, clip=limit, engine=engine)
    method = FedProx(
        problem.network(START), local_epochs=2, batch_size=2, loss=HalfSquaredError(), **settings
    )
    steps = Steps()
    history = watch(method, problem, 2, callbacks=[steps])
    w = START
    clipped = 0
    for number, batches in enumerate(steps.batches(problem)):
        ends = []
        for i in range(4):
            v = w.copy()
            for samples in batches[i]:
                g = problem.gradient(i, v, samples)
                clipped += np.linalg.norm(g) > limit
                v = v - lr * (clip(g, limit) + decay * v + mu * (v - w))
            ends.append(v)
        w = np.average(ends, axis=0, weights=problem.sizes)
        np.testing.assert_allclose(history["w"][number], w, rtol=0, atol=1e-12)
    assert 0 < clipped < 2 * 20  # of the 20 steps of each round


def test_a_part_is_clipped_by_its_own_norm(fit):
    """FedRep trains the head first: the norm is that of the head's gradient alone."""
    problem = least_squares((6,), bias=True)
    settings = dict(lr=0.1, clip=0.5, local_steps=1, head_epochs=1, personal=["bias"], **FULL)
    method = fit(FedRep(problem.network(START), **settings), problem, 1)
    head = START.copy()
    head[6:] -= 0.1 * clip(problem.gradient(0, START)[6:], 0.5)
    body = head.copy()
    body[:6] -= 0.1 * clip(problem.gradient(0, head)[:6], 0.5)
    np.testing.assert_allclose(method.global_model[:6], body[:6], rtol=0, atol=1e-12)


def test_a_limit_that_nothing_reaches_changes_nothing(fit):
    problem = least_squares((7, 2, 5, 3), bias=True)
    arguments = dict(lr=0.1, local_epochs=2, batch_size=2, loss=HalfSquaredError())
    plain = fit(FedAvg(problem.network(START), **arguments), problem, 3).global_model
    same = fit(FedAvg(problem.network(START), clip=1e9, **arguments), problem, 3).global_model
    torch.testing.assert_close(plain, same, rtol=0, atol=1e-13)


def test_momentum_gets_clipped_gradients(fit):
    """Two steps of momentum β on f = (v - 3)^2 / 2 from 0, clipped at 1: -1, then -1 - β."""
    problem = scalar_problem([3.0])

    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    arguments = dict(lr=0.1, local_steps=2, clip=1.0, optimizer=momentum, **FULL)
    method = fit(FedAvg(problem.network(0.0), **arguments), problem, 1)
    assert float(method.global_model) == pytest.approx(0.1 * 1 + 0.1 * 1.9, abs=1e-12)


SCHEDULES = [
    (Cosine(rounds=4, floor=0.2), lambda t: 0.2 + 0.8 * (1 + math.cos(math.pi * t / 4)) / 2),
    (WarmUp(rounds=3), lambda t: [1 / 3, 2 / 3, 1, 1][t]),
    (Decay(rounds=2, factor=0.5), lambda t: [1, 1, 0.5, 0.5][t]),
    ([WarmUp(rounds=2), Decay(rounds=3, factor=0.1)], lambda t: [0.5, 1, 1, 0.1][t]),
]


@pytest.mark.parametrize(("schedule", "factor"), SCHEDULES)
def test_a_rate_by_round_has_its_closed_form(fit, schedule, factor):
    """One step a round on (w - 1)^2 / 2: each round multiplies w - 1 by 1 - η factor(round)."""
    problem = scalar_problem([1.0])
    method = FedAvg(problem.network(3.0), lr=0.5, lr_decay=0.9, schedule=schedule, **FULL)
    fit(method, problem, 4)
    expected = 1 + 2 * np.prod([1 - 0.5 * 0.9**t * factor(t) for t in range(4)])
    assert float(method.global_model) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_rate_by_step_begins_anew_in_every_round(fit, engine, momentum):
    """On (w - 1)^2 / 2 with d = w - 1: m <- β m + d, d <- d - η factor(k) m, over two rounds."""
    problem = scalar_problem([1.0])
    optimizer = None
    if momentum:

        def optimizer(parameters):
            return torch.optim.SGD(parameters, lr=0.5, momentum=momentum)

    schedule = [WarmUp(steps=2), Cosine(steps=4)]
    arguments = dict(lr=0.5, local_steps=3, schedule=schedule, engine=engine, optimizer=optimizer)
    method = fit(FedAvg(problem.network(3.0), **arguments, **FULL), problem, 2)
    d = 2.0
    for _ in range(2):
        m = 0.0
        for k in range(3):
            m = momentum * m + d
            d -= 0.5 * [0.5, 1, 1][k] * (1 + math.cos(math.pi * k / 4)) / 2 * m
    assert float(method.global_model) == pytest.approx(1 + d, abs=1e-12)


def test_a_prox_gets_the_rate_of_the_step(fit):
    """LPGD on a 1x1 matrix: w <- w - η_k (w - 3), then its singular value shrinks by λ η_k."""
    problem = scalar_problem([3.0])
    arguments = dict(lr=0.5, local_steps=2, schedule=Decay(steps=1, factor=0.5), **FULL)
    method = fit(LPGD(problem.network(1.0), low_rank_penalty=0.2, **arguments), problem, 1)
    w = 1.0
    for rate in (0.5, 0.25):
        w = w - rate * (w - 3) - rate * 0.2
    assert float(method.global_model) == pytest.approx(w, abs=1e-12)


def labelled(counts):
    """Clients with so many samples of each class, on one feature, and a linear network."""
    rng = np.random.default_rng(3)
    y = np.concatenate([np.repeat(np.arange(3), n) for n in counts])
    owners = np.repeat(np.arange(len(counts)), [sum(n) for n in counts])
    x = rng.normal(size=(len(y), 2))
    data = TensorDataModule(
        torch.tensor(x), torch.tensor(y), client_ids=owners, partition=Natural(), num_clients=None,
        protocol=SplitOwn(test=0.0, validation=0.0),
    )  # fmt: skip
    return data, x, y, owners


@pytest.mark.parametrize("engine", ENGINES)
def test_the_classes_of_each_client_count_alike(fit, engine):
    """A full-batch step is that of the mean of n / (K n_k) times the sample's cross entropy, of the
    K classes that the client has."""
    data, x, y, owners = labelled([(1, 4, 3), (6, 2, 0)])
    torch.manual_seed(0)
    network = nn.Linear(2, 3).double()
    start = nn.utils.parameters_to_vector(network.parameters()).detach().clone()
    ends = []
    for i, counts in enumerate([(1, 4, 3), (6, 2, 0)]):
        own = nn.Linear(2, 3).double()
        nn.utils.vector_to_parameters(start.clone(), own.parameters())
        inputs, targets = torch.tensor(x[owners == i]), torch.tensor(y[owners == i])
        present = sum(n > 0 for n in counts)
        weights = torch.tensor(
            [8 / (present * n) if n else 0.0 for n in counts], dtype=torch.float64
        )
        losses = nn.functional.cross_entropy(own(inputs), targets, reduction="none")
        (weights[targets] * losses).mean().backward()
        moved = [p.detach() - 0.3 * p.grad for p in own.parameters()]
        ends.append(torch.cat([p.flatten() for p in moved]))
    arguments = dict(lr=0.3, batch_size=None, class_weights="client", engine=engine)
    method = fit(FedAvg(network, **arguments), data, 1, evaluate=())
    torch.testing.assert_close(method.global_model, (ends[0] + ends[1]) / 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("parts", [2, 3, 9])
def test_a_gradient_in_parts_is_that_of_the_mini_batch(fit, engine, parts):
    """Mini-batches of 4 of 7, 2, 5 and 3 samples: parts are unequal, and some rows have none."""
    problem = least_squares((7, 2, 5, 3), bias=True)
    settings = dict(lr=0.1, local_epochs=2, batch_size=4, loss=HalfSquaredError(), engine=engine)
    whole = fit(FedProx(problem.network(START), **settings), problem, 2)
    one = fit(FedProx(problem.network(START), accumulate=parts, **settings), problem, 2)
    torch.testing.assert_close(one.global_model, whole.global_model, rtol=0, atol=1e-12)
    assert one.progress.samples == whole.progress.samples == 2 * 2 * 17


@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_the_parts_of_a_mini_batch_depend_on_no_other_client(fit, engine):
    """Dropout draws by the part: mini-batches of 5 samples beside some of 4, 3 and 1, and alone."""
    data = labelled([(4, 5, 3), (6, 2, 1), (0, 1, 2)])[0]
    torch.manual_seed(0)
    layers = [nn.Linear(2, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 3)]
    network = nn.Sequential(*layers).double()
    ends = []
    for at_once in (1, 3):
        method = FedAvg(
            copy.deepcopy(network),
            lr=0.3,
            batch_size=5,
            accumulate=3,
            local_epochs=2,
            engine=engine,
        )
        fit(method, data, 2, clients_at_once=at_once, evaluate=())
        ends.append(method.global_model)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def test_a_client_s_own_loss_and_rows_go_with_its_part(fit):
    """MOON's models and the class weights of each client are those of its rows in each part."""
    data = labelled([(1, 4, 3), (6, 2, 0), (0, 1, 2)])[0]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    for kind, more in ((MOON, {}), (FedAvg, {"class_weights": "client"})):
        ends = []
        for parts in (1, 3):
            settings = dict(lr=0.3, batch_size=5, local_epochs=2, accumulate=parts, **more)
            method = fit(kind(copy.deepcopy(network), **settings), data, 3, evaluate=())
            ends.append(method.global_model)
        torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def stopping_data(path):
    """Three clients of one training sample each, f_i(w) = (w - A_i)^2 / 2 with A = 3, 2 and 1; the
    validation losses of the first two are (w - 1)^2 / 2 and (w - 2)^2 / 2, the third has none."""
    x = torch.ones(5, 1, dtype=torch.float64)
    y = torch.tensor([3.0, 2.0, 1.0, 1.0, 2.0], dtype=torch.float64)[:, None]
    owners = np.array([0, 1, 2, 0, 1])
    whole = SplitOwn(test=0.0, validation=0.0)
    first = TensorDataModule(x, y, client_ids=owners, partition=Natural(), protocol=whole,
                             num_clients=None)  # fmt: skip
    train = Ragged.from_sizes(np.array([0, 1, 2]), np.array([1, 1, 1]))
    val = Ragged.from_sizes(np.array([3, 4]), np.array([1, 1, 0]))
    replace(first.partition, train=train, val=val).save(path)
    return TensorDataModule(x, y, partition=Given(path), num_clients=None)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("patience", "epochs"), [(1, 3), (2, 4), (9, 5)])
def test_a_client_stops_after_its_best_epoch(fit, tmp_path, engine, patience, epochs):
    """After t epochs at the rate 0.2 w is A (1 - 0.8^t): for A = 3 that is 0.6, 1.08, 1.46, ...,
    of which 1.08 is nearest to 1, so that the client keeps it, and stops `patience` epochs later.
    The second client comes nearer and nearer to its 2, and the third never stops."""
    data = stopping_data(tmp_path / "partition.npz")
    network = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(network.weight)
    settings = dict(lr=0.2, local_epochs=5, local_patience=patience, engine=engine)
    method = fit(FedAvg(network, **settings, **FULL), data, 1, evaluate=())
    ends = [3 * (1 - 0.8**2), 2 * (1 - 0.8**5), 1 - 0.8**5]
    assert float(method.global_model) == pytest.approx(np.mean(ends), abs=1e-12)
    assert method.progress.samples == epochs + 5 + 5


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_that_has_stopped_does_not_diverge_meanwhile(fit, tmp_path, engine):
    """The first client's samples have the curvature 55 and the optimum 3: at the rate 0.2 its
    distance to it is multiplied by -10, from 0 to 33 to -297, and would pass the largest number
    after 155 epochs. It stops after two. The second one, with the optimum 1 and no validation
    sample, takes all 200."""
    x = torch.tensor([55**0.5, 1.0, 1.0], dtype=torch.float64)[:, None]
    y = torch.tensor([3 * 55**0.5, 1.0, 1.0], dtype=torch.float64)[:, None]
    owners = np.array([0, 1, 0])
    whole = SplitOwn(test=0.0, validation=0.0)
    own = TensorDataModule(x, y, client_ids=owners, partition=Natural(), protocol=whole)
    train = Ragged.from_sizes(np.array([0, 1]), np.array([1, 1]))
    val = Ragged.from_sizes(np.array([2]), np.array([1, 0]))
    replace(own.partition, train=train, val=val).save(tmp_path / "p.npz")
    data = TensorDataModule(x, y, partition=Given(tmp_path / "p.npz"), num_clients=None)
    network = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(network.weight)
    settings = dict(lr=0.2, local_epochs=200, local_patience=1, engine=engine)
    method = fit(FedAvg(network, **settings, **FULL), data, 1, evaluate=())
    assert float(method.global_model) == pytest.approx((33 + 1 - 0.8**200) / 2, rel=1e-12)
    losses = [55 * 3**2 / 2, 55 * 30**2 / 2, *(0.64**t / 2 for t in range(200))]
    assert method.row["train/loss"] == pytest.approx(np.mean(losses), rel=1e-12)


def test_running_statistics_are_those_of_the_best_epoch(fit, tmp_path):
    """Momentum 0.5 of BatchNorm: after t steps of one mini-batch with the mean 1 and no variance
    the running mean is 1 - 0.5^t; only a client that keeps its first epoch has 0.5."""
    x = torch.tensor([[1.0], [1.0], [4.0]]).double()
    y = torch.tensor([[3.0], [3.0], [0.0]]).double()
    own = TensorDataModule(x, y, client_ids=np.zeros(3, int), partition=Natural(),
                           protocol=SplitOwn(0.0, 0.0), num_clients=None)  # fmt: skip
    train = Ragged.from_sizes(np.array([0, 1]), np.array([2]))
    val = Ragged.from_sizes(np.array([2]), np.array([1]))
    replace(own.partition, train=train, val=val).save(tmp_path / "p.npz")
    data = TensorDataModule(x, y, partition=Given(tmp_path / "p.npz"), num_clients=None)
    network = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5), nn.Linear(1, 1)).double()
    nn.init.zeros_(network[1].weight)
    nn.init.zeros_(network[1].bias)
    settings = dict(lr=0.2, local_epochs=4, local_patience=1, engine="sequential")
    method = fit(FedAvg(network, **settings, **FULL), data, 1, evaluate=())
    # The bias rises from 0 to 3, away from the validation sample's 0: the first epoch is the best.
    assert float(method.network[0].running_mean) == pytest.approx(0.5, abs=1e-12)
    assert float(method.network[1].bias.detach()) == pytest.approx(0.2 * 3, abs=1e-12)
    assert method.progress.samples == 2 * 2


def test_patience_needs_validation_samples(fit):
    problem = scalar_problem([0.0, 1.0])
    with pytest.raises(ConfigError, match=r"^model.local_patience: 2; it needs validation samples"):
        fit(FedAvg(problem.network(0.0), local_patience=2, **FULL), problem, 1)


# ---- what differs by client ------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["auto", "debug"])
def test_rates_and_steps_by_client(fit, engine):
    """On (w - A_i)^2 / 2 client i multiplies w - A_i by (1 - η r_i)^(E s_i), E = 2 epochs."""
    optima, rates, work = [0.0, 1.0, 3.0], [1.0, 0.5, 1.0], [1.0, 3.0, 0.5]
    problem = scalar_problem(optima)
    by_client = {"1": {"rate": 0.5, "work": 3}, "2": {"work": 0.5}}
    method = FedAvg(problem.network(5.0), lr=0.2, local_epochs=2, engine=engine, **FULL)
    fit(method, problem, 1, by_client=by_client)
    ends = [
        a + (5.0 - a) * (1 - 0.2 * r) ** round(2 * s)
        for a, r, s in zip(optima, rates, work, strict=True)
    ]
    assert float(method.global_model) == pytest.approx(np.mean(ends), abs=1e-12)


def test_rates_by_client_come_from_a_file(fit, tmp_path):
    problem = scalar_problem([0.0, 1.0])
    path = tmp_path / "clients.json"
    path.write_text(json.dumps({"1": {"rate": 0.5}}))
    method = FedAvg(problem.network(2.0), lr=0.2, **FULL)
    fit(method, problem, 1, by_client=str(path))
    assert float(method.global_model) == pytest.approx((1.6 + 1.9) / 2, abs=1e-12)


def test_scaffold_divides_by_the_rate_of_the_client(fit):
    """Option II with one full step: c_i+ = c_i - c + (x - y) / η_i = g_i(x), whatever η_i is."""
    problem = scalar_problem([0.0, 3.0])
    method = SCAFFOLD(problem.network(5.0), lr=0.2, local_steps=1, **FULL)
    fit(method, problem, 1, by_client={"0": {"rate": 0.25}})
    assert float(method.c) == pytest.approx((5.0 + 2.0) / 2, abs=1e-12)


def test_fednova_counts_the_steps_of_each_client(fit):
    """d_i = (v - w) / τ_i and w <- w + mean τ mean d, with τ = 1 and 3."""
    problem = scalar_problem([0.0, 1.0])
    method = FedNova(problem.network(2.0), lr=0.5, local_steps=1, **FULL)
    fit(method, problem, 1, by_client={"1": {"work": 3}})
    moves = np.array([2.0 * (0.5 - 1), (0.5**3 - 1) / 3])
    assert float(method.global_model) == pytest.approx(2 + 2 * moves.mean(), abs=1e-12)


def test_clients_are_known_by_their_names(fit):
    data = TensorDataModule(
        torch.zeros(4, 1, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64),
        client_ids=np.array(["north", "north", "south", "south"]), partition=Natural(),
        num_clients=None, protocol=SplitOwn(test=0.0, validation=0.0),
    )  # fmt: skip
    network = nn.Linear(1, 1).double()
    with pytest.raises(ConfigError, match=r"^loop.by_client: 'nort'; .*did you mean 'north'\?$"):
        fit(FedAvg(network), data, 1, by_client={"nort": {"rate": 0.5}})
    method = fit(FedAvg(network, lr=0.1), data, 1, by_client={"south": {"rate": 0.5}})
    assert method.run.loop.participation.rates(np.array([0, 1])).tolist() == [1.0, 0.5]


BAD = [
    ({"0": {"rate": 0}}, "loop.by_client.0.rate: 0; it must be a number above 0"),
    ({"0": {"lr": 1}}, "loop.by_client.0: {'lr': 1}; it must be like {work: 2, rate: 0.5}"),
    ({"9": {"rate": 1.0}}, "loop.by_client: '9'; it must be the name of a client"),
]


@pytest.mark.parametrize(("given", "line"), BAD)
def test_bad_factors_of_clients_are_refused(fit, given, line):
    problem = scalar_problem([0.0, 1.0])
    with pytest.raises(ConfigError) as error:
        fit(FedAvg(problem.network(0.0), **FULL), problem, 1, by_client=given)
    assert str(error.value) == line


@pytest.mark.parametrize("kind", [FedAgg, L2GD])
def test_methods_that_set_rates_refuse_those_of_clients(fit, kind):
    problem = scalar_problem([0.0, 1.0])
    with pytest.raises(ConfigError, match="sets the rates of clients; leave rate out"):
        fit(kind(problem.network(0.0), **FULL), problem, 1, by_client={"1": {"rate": 0.5}})


def test_pooled_samples_have_no_clients(fit):
    problem = scalar_problem([0.0, 1.0])
    with pytest.raises(ConfigError, match="GlobalTrain trains no single clients"):
        fit(GlobalTrain(problem.network(0.0)), problem, 1, by_client={"1": {"work": 0.5}})


# ---- what a method cannot take -----------------------------------------------------------------

OWN_STEPS = [FedNova, PerFedAvg, SCAFFOLD, APFL, pFedMe, L2GD, FedPD, FedAgg]
AIDS = [
    ({"clip": 1.0}, "model.clip: 1.0; "),
    ({"schedule": WarmUp(steps=2)}, "model.schedule: a schedule by local step; "),
    ({"local_patience": 2}, "model.local_patience: 2; "),
    ({"accumulate": 2}, "model.accumulate: 2; "),
    ({"class_weights": "client"}, "model.class_weights: client; "),
]


@pytest.mark.parametrize(("aid", "line"), AIDS)
@pytest.mark.parametrize("kind", OWN_STEPS)
def test_methods_with_steps_of_their_own_refuse_aids(kind, aid, line):
    with pytest.raises(ConfigError) as error:
        kind(nn.Linear(2, 3), **aid)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize("kind", [FedDBE, FedRoD, Floco])
def test_methods_with_loops_of_their_own_refuse_clipping(kind):
    with pytest.raises(ConfigError, match="local steps of its own"):
        kind(nn.Linear(2, 3), clip=1.0)


class OwnLoop(FederatedAlgorithm):
    """A user's method, whose loop knows of no aids."""

    def client_update(self, clients: Clients, w):
        v = w.repeat(len(clients), 1)
        for batch in clients.batches(self.local_schedule):
            v -= self.rate_of(clients) * self.oracle.gradient(v, batch, clients.buffers)[1]
        return v


def test_the_first_round_refuses_a_loop_that_leaves_an_aid_out(fit):
    problem = scalar_problem([0.0, 1.0])
    fit(OwnLoop(problem.network(0.0), **FULL), problem, 1)
    with pytest.raises(ConfigError, match=r"^model.clip: 1.0; OwnLoop has local steps of its own"):
        fit(OwnLoop(problem.network(0.0), clip=1.0, **FULL), problem, 1)


def test_class_weights_need_classes_and_the_loss(fit):
    problem = scalar_problem([0.0, 1.0])
    with pytest.raises(ConfigError, match=r"^model.class_weights: client; it needs one class"):
        fit(FedAvg(problem.network(0.0), class_weights="client", **FULL), problem, 1)
    data = labelled([(1, 4, 3)])[0]
    with pytest.raises(ConfigError, match="FedLC has a loss of its own"):
        fit(FedLC(nn.Linear(2, 3).double(), class_weights="client"), data, 1)


def test_corollary_2_gives_the_rate():
    with pytest.raises(
        ConfigError, match=r"^model.schedule: local_step: corollary2 gives the rate"
    ):
        FedCLUP(nn.Linear(2, 1), local_step="corollary2", schedule=Cosine(rounds=3))


@pytest.mark.parametrize("given", [{}, {"rounds": 2, "steps": 2}])
def test_a_schedule_is_about_rounds_or_steps(given):
    with pytest.raises(ConfigError, match="give one of them, such as Cosine"):
        Cosine(**given)


# ---- resumed runs --------------------------------------------------------------------------------


def test_a_resumed_run_is_equal_bit_for_bit(fit, tmp_path):
    from tests.problems import quiet

    problem = least_squares((7, 2, 5, 3), bias=True)

    def method():
        schedule = [Cosine(rounds=5), WarmUp(steps=3)]
        settings = dict(lr=0.1, clip=0.6, schedule=schedule, local_epochs=2, batch_size=2)
        return FedAvg(problem.network(START), loss=HalfSquaredError(), **settings)

    def train(rounds, name, **kw):
        from pfl import FederatedLoop

        loop = FederatedLoop(problem.datamodule, by_client={"2": {"rate": 0.5, "work": 2}})
        one = method()
        quiet(tmp_path, rounds, precision="64-true", name=name).fit(one, datamodule=loop, **kw)
        return one.global_model.clone()

    whole = train(4, "whole")
    train(2, "half")
    resumed = train(4, "half", ckpt_path=str(tmp_path / "half/checkpoints/last.ckpt"))
    assert torch.equal(whole, resumed)
