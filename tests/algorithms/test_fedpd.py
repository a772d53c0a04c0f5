"""FedPD round by round against NumPy: both oracles, the shared coin, and what is sent."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from models import HalfSquaredError
from pfl.algorithms import FedPD, PerFedAvg
from tests.algorithms import reference_clup_pd as reference
from tests.algorithms.reference_clup_pd import assert_rounds
from tests.problems import Steps, least_squares, scalar_problem
from tests.refusal import refused

LOSS = HalfSquaredError()
FULL = dict(batch_size=None, loss=LOSS)
START = np.linspace(-1.0, 1.0, 8)
BYTES = 8 * 8  # 8 parameters in float64


@pytest.fixture(scope="module")
def problem():
    """Clients of unequal size, a 3 x 2 matrix and 2 biases."""
    return least_squares((7, 4, 5, 6), bias=True, seed=3)


def talks(history, nbytes=BYTES):
    """In which rounds the agents communicated, read off the ledger; all of them, or none."""
    ways = [np.diff(history[way], axis=0, prepend=0) for way in ("up", "down")]
    np.testing.assert_array_equal(*ways)
    assert np.isin(ways[0], (0, nbytes)).all()
    assert (ways[0] == ways[0][:, :1]).all()
    return (ways[0][:, 0] > 0).tolist()


def carried(history):
    """From which x_{0,i} [M, P] the agents go on after each round: the store keeps what they made,
    x_i + η λ_i, in whose place the mean of all comes where they communicate."""
    return [
        {"x0": np.tile(row["w"], (4, 1)) if row["common"] else row["x0"]} for row in history.rounds
    ]


# ---- Oracle I -----------------------------------------------------------------------------------

SETTINGS = dict(eta=0.4, lr=0.08, steps=3)
OTHER = dict(eta=2.5, lr=0.1, steps=2)
BOTH_STEPS = pytest.mark.parametrize(
    "settings", [SETTINGS, OTHER], ids=["small step", "large step"]
)


def fedpd(network, *, eta, lr=0.1, steps=None, gamma=None, tolerance=None, **kwargs):
    """The method, with the paper's symbols."""
    arguments = dict(proximal_step=eta, lr=lr, inner_step=gamma, residual_tolerance=tolerance)
    return FedPD(
        network, **arguments, **{} if steps is None else {"local_steps": steps}, **FULL | kwargs
    )


@pytest.mark.parametrize("at_once", [None, 1], ids=["together", "one by one"])
@pytest.mark.parametrize("skip", [0.0, 0.5])
@BOTH_STEPS
def test_every_iterate_equals_numpy(watch, problem, settings, skip, at_once):
    algorithm = fedpd(problem.network(START), skip_probability=skip, lr_decay=0.9, **settings)
    history = watch(algorithm, problem, 8, clients_at_once=at_once)
    coins = talks(history)
    assert all(coins) if skip == 0 else any(coins) and not all(coins)
    expected = reference.fedpd(problem, START, coins, lr_decay=0.9, **settings)
    assert_rounds(history.rounds, expected, "w", "x", "lam")
    assert algorithm.has_global and not algorithm.has_personalized
    if skip:
        # Between communications every agent has an x_0 of its own; then it is common again.
        assert history["common"].tolist() == coins
        assert_rounds(carried(history), expected, "x0")


def test_a_client_stops_where_its_residual_is_small(watch, problem):
    """|grad_x L_i|^2 <= ε1 is asked before each step: clients stop one after another, later ones
    go on to the last of the Q steps, and a client that is done at once does not move."""
    settings = dict(eta=0.5, lr=0.1, steps=4, tolerance=0.4)
    rounds = [True] * 8
    expected = reference.fedpd(problem, START, rounds, **settings)
    taken = [row["steps"].tolist() for row in expected]
    assert any(len(set(row)) > 2 for row in taken) and 0 in np.min(taken, axis=1)
    assert max(map(max, taken)) == 4
    history = watch(fedpd(problem.network(START), **settings), problem, 8)
    assert_rounds(history.rounds, expected, "w", "x", "lam")
    without = reference.fedpd(problem, START, rounds, **(settings | dict(tolerance=None)))
    assert np.abs(without[-1]["w"] - expected[-1]["w"]).max() > 1e-3


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
@pytest.mark.parametrize("passes", [dict(local_epochs=2), dict(local_steps=5)], ids=str)
def test_mini_batches(watch, problem, passes, engine):
    steps = Steps()
    arguments = dict(eta=0.6, lr=0.05, batch_size=3, skip_probability=0.4, engine=engine)
    algorithm = fedpd(problem.network(START), **arguments, **passes)
    history = watch(algorithm, problem, 6, callbacks=[steps])
    batches = steps.batches(problem)
    counts = [6, 4, 4, 4] if "local_epochs" in passes else [5] * 4
    assert all([len(client) for client in row] == counts for row in batches)
    expected = reference.fedpd(
        problem, START, talks(history), eta=0.6, lr=0.05, steps=0, batches=batches
    )
    assert_rounds(history.rounds, expected, "w", "x", "lam")
    assert_rounds(carried(history), expected, "x0")


# ---- Oracle II ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [None, 0.7, 5.0])
@pytest.mark.parametrize("skip", [0.0, 0.5])
@pytest.mark.parametrize("refresh", [1, 100])
def test_variance_reduction_with_full_gradients(watch, problem, gamma, skip, refresh):
    """Then g stays grad f_i at the newest x, whenever it was refreshed."""
    settings = dict(eta=0.1, steps=3)
    arguments = dict(gamma=gamma, variance_reduction=True, refresh_period=refresh)
    algorithm = fedpd(problem.network(START), skip_probability=skip, **arguments, **settings)
    history = watch(algorithm, problem, 7)
    expected = reference.fedpd(
        problem, START, talks(history), refresh=refresh, gamma=gamma or np.inf, **settings
    )
    assert_rounds(history.rounds, expected, "w", "x", "lam", "g")
    for i in range(4):
        np.testing.assert_allclose(
            history["g"][-1, i], problem.gradient(i, history["x"][-1, i]), rtol=0, atol=1e-11
        )


VR = dict(eta=0.1, steps=4)


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
@pytest.mark.parametrize(("gamma", "skip"), [(None, 0.0), (0.7, 0.0), (0.7, 0.5)])
@pytest.mark.parametrize("refresh", [1, 4])
def test_variance_reduction_with_mini_batches(watch, problem, gamma, skip, refresh, engine):
    """g <- g + mean_B(h(x+) - h(x)) with the same samples in both; g is the full gradient
    at the beginning of rounds r with r mod I = 0."""
    steps = Steps()
    arguments = dict(gamma=gamma, variance_reduction=True, refresh_period=refresh, batch_size=2)
    algorithm = fedpd(
        problem.network(START), skip_probability=skip, engine=engine, **arguments, **VR
    )
    history = watch(algorithm, problem, 7, callbacks=[steps])
    batches = steps.batches(problem, once=True)
    for r, clients in enumerate(batches):
        for i, client in enumerate(clients):
            if r % refresh == 0:  # the first gradient of the round is the full one
                assert sorted(client.pop(0)) == list(range(problem.sizes[i]))
            assert len(client) == 4 and all(len(batch) <= 2 for batch in client)
    given = dict(batches=batches, refresh=refresh, gamma=gamma or np.inf)
    expected = reference.fedpd(problem, START, talks(history), **given, **VR)
    assert_rounds(history.rounds, expected, "w", "x", "lam", "g")
    # It is not what full gradients give.
    exact = reference.fedpd(
        problem, START, talks(history), refresh=refresh, gamma=gamma or np.inf, **VR
    )
    assert np.abs(exact[-1]["g"] - expected[-1]["g"]).max() > 0.01


@pytest.mark.parametrize("other", [dict(batch_size=2), dict(variance_reduction=True)], ids=str)
def test_a_tolerance_needs_full_gradients_and_oracle_one(problem, other):
    with refused("model.residual_tolerance: 0.1; it must be positive, with full gradients and"):
        fedpd(problem.network(START), eta=0.1, lr=0.1, steps=4, tolerance=0.1, **other)


class Doubles(nn.Module):
    """A linear network of inputs that are doubled, in place or not."""

    def __init__(self, inner, in_place):
        super().__init__()
        self.inner, self.in_place = inner, in_place

    def forward(self, x):
        return self.inner(x.mul_(2.0) if self.in_place else 2.0 * x)


@pytest.mark.parametrize(
    ("kind", "settings"), [(FedPD, {"variance_reduction": True}), (PerFedAvg, {"variant": "HF"})]
)
def test_a_network_may_change_its_inputs(fit, problem, kind, settings):
    """Both gradients of a difference are taken at the same samples."""
    settings |= dict(lr=0.05, batch_size=2, local_steps=2, engine="sequential", loss=LOSS)
    one, other = (
        kind(Doubles(problem.network(START), in_place), **settings) for in_place in (True, False)
    )
    for algorithm in (one, other):
        fit(algorithm, problem, 2)
    assert torch.equal(one.global_model, other.global_model)


# ---- communication ------------------------------------------------------------------------------


def coins(watch, skip, rounds=60, seed=0, **loop):
    problem = scalar_problem([0.0, 1.0, 3.0], [1.0, 2.0, 0.5])
    algorithm = fedpd(problem.network(1.0), eta=0.5, lr=0.2, steps=1, skip_probability=skip)
    history = watch(algorithm, problem, rounds, seed=seed, **loop)
    actual = talks(history, nbytes=8)
    # The pattern that the ledger shows is the one that the states show.
    expected = reference.fedpd(problem, np.array([1.0]), actual, eta=0.5, lr=0.2, steps=1)
    assert_rounds(history.rounds, expected, "w", "x", "lam")
    return actual


@pytest.mark.parametrize("skip", [0.25, 0.5, 0.75])
def test_the_coin_is_fair_and_shared(watch, skip):
    """p is the probability of *skipping*: of T rounds (1 - p) T communicate, ± 4.5 deviations."""
    actual, rounds = coins(watch, skip), 60
    spread = 4.5 * np.sqrt(rounds * skip * (1 - skip))
    assert abs(sum(actual) - rounds * (1 - skip)) < spread
    # A round's coin does not depend on the one before: all four pairs of successive coins occur.
    pairs = {tuple(pair) for pair in pairwise(actual)}
    assert len(pairs) == 4


def test_the_coin_is_a_function_of_seed_and_round(watch):
    first = coins(watch, 0.5, rounds=20)
    assert coins(watch, 0.5, rounds=20, clients_at_once=1) == first
    assert coins(watch, 0.5, rounds=12) == first[:12]
    assert coins(watch, 0.5, rounds=20, seed=1) != first


@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_communication_period(watch, problem, period):
    """Rounds k, 2k, ... (from 1) communicate."""
    algorithm = fedpd(problem.network(START), communication_period=period, **SETTINGS)
    history = watch(algorithm, problem, 7)
    actual = talks(history)
    assert actual == [number % period == 0 for number in range(1, 8)]
    expected = reference.fedpd(problem, START, actual, **SETTINGS)
    assert_rounds(history.rounds, expected, "w", "x", "lam")
    count = 7 // period
    np.testing.assert_array_equal(history["up"][-1], count * BYTES)
    np.testing.assert_array_equal(history["down"][-1], count * BYTES)
    assert algorithm.progress.bytes_up == algorithm.progress.bytes_down == 4 * count * BYTES


def test_nothing_to_keep_where_nothing_is_skipped(fit, problem):
    """x_{0,i} is common, and g is not used: 2 P floats a client."""
    algorithm = fedpd(problem.network(START), **SETTINGS)
    fit(algorithm, problem, 1)
    assert sorted(algorithm.store.names) == ["lam", "x"]
    assert algorithm.personalization_penalty == np.inf
    settings = dict(skip_probability=0.5, variance_reduction=True, eta=0.4, steps=1)
    algorithm = fedpd(problem.network(START), **settings)
    fit(algorithm, problem, 1)
    assert sorted(algorithm.store.names) == ["g", "lam", "x", "x0"]


# ---- who takes part -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loop", "key"),
    [
        (dict(clients_per_round=2), "clients_per_round"),
        (dict(clients_per_round=2, sampling="bernoulli"), "clients_per_round"),
        (dict(trace=[[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]]), "trace"),
    ],
    ids=["uniform", "bernoulli", "trace"],
)
def test_partial_participation_is_refused(fit, problem, loop, key):
    with refused("FedPD", key):
        fit(fedpd(problem.network(START), **SETTINGS), problem, 3, **loop)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_oracle_two_refuses_states_in_sixteen_bits(fit, problem, dtype):
    """Its g_i is corrected step by step, so that every rounding of x_i or g_i would stay in it."""
    with refused("loop.state_dtype", dtype, "variance_reduction"):
        algorithm = fedpd(problem.network(START), variance_reduction=True, **VR)
        fit(algorithm, problem, 1, state_dtype=dtype)
    fit(fedpd(problem.network(START), **SETTINGS), problem, 1, state_dtype=dtype)


@pytest.mark.parametrize("trace", [[[], 4, 4, 4], [4, [], 4, 4]], ids=["first", "second"])
def test_an_empty_round_does_not_cost_a_refresh(watch, problem, trace):
    """I = 1 and 20: g is the full gradient when the agents first train, whichever round it is."""
    trace = [list(range(4)) if cohort else [] for cohort in trace]
    for refresh in (1, 20):
        algorithm = fedpd(
            problem.network(START), variance_reduction=True, refresh_period=refresh, **VR
        )
        history = watch(algorithm, problem, 4, trace=trace)
        full = [t for t, cohort in enumerate(trace) if cohort]
        expected = reference.fedpd(problem, START, [True] * 3, refresh=refresh, **VR)
        actual = [history.rounds[t] for t in full]
        assert_rounds(actual, expected, "w", "x", "lam", "g")
