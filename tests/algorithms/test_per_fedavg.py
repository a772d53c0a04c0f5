"""Per-FedAvg against a slow NumPy loop, its fixed points, and FedAvg where both are the same."""

import numpy as np
import pytest
from torch import nn

from pfl.algorithms import FedAvg, PerFedAvg
from tests.algorithms.traced import ALL, LOSS, SIZES, START
from tests.problems import Steps, least_squares, scalar_problem
from tests.refusal import refused

TRACE = [ALL, [1, 3], [0], [], [0, 2, 3], ALL]
RATES = dict(lr=0.1, lr_decay=0.8, weight_decay=0.1, alpha=0.15)
VARIANTS = pytest.mark.parametrize("variant", ["FO", "HF"])


# ---- a second implementation --------------------------------------------------------------------


def per_fedavg(problem, w, batches, variant, *, lr, alpha, lr_decay=1.0, weight_decay=0.0):
    """Algorithm 1, client by client and step by step; w after each round.

    `batches[t][i]` has D1, D2 and D3 of each local step that client i takes in round t. The Hessian
    is a matrix.
    """
    size, history = problem.size, []

    def gradient(i, v, samples):
        return problem.gradient(i, v, samples) + weight_decay * v

    def hessian(i, samples):
        """The gradient is affine, so that its differences are the columns."""
        at_zero = gradient(i, np.zeros(size), samples)
        return np.stack([gradient(i, unit, samples) - at_zero for unit in np.eye(size)], axis=1)

    for t, cohort in enumerate(batches):
        beta = lr * lr_decay**t
        models = []
        for i, steps in cohort.items():
            v = w.copy()
            for d1, d2, d3 in steps:
                q = gradient(i, v - alpha * gradient(i, v, d1), d2)
                if variant == "HF":
                    q = q - alpha * hessian(i, d3) @ q
                v = v - beta * q
            models.append(v)
        w = np.mean(models, axis=0) if models else w
        history.append(w)
    return history


def full(steps, trace=TRACE):
    """Full gradients: `steps` steps on all samples for everyone of each cohort."""
    return [{i: [(None, None, None)] * steps for i in cohort} for cohort in trace]


@VARIANTS
def test_rounds_equal_the_numpy_loop(follow, problem, variant):
    """Partial participation, a round without clients, unequal clients, decayed β."""
    history = follow(
        PerFedAvg, trace=TRACE, **RATES, variant=variant, local_steps=4, batch_size=None, loss=LOSS
    )
    expected = per_fedavg(problem, START, full(4), variant, **RATES)
    np.testing.assert_allclose(history["w"], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
@VARIANTS
def test_three_mini_batches_a_step(follow, problem, variant, engine):
    """Two epochs of batches of two: clients take 8, 2, 6 and 4 steps. The oracle is called for D1,
    D2 and, twice, for D3; an epoch of each of the three has every sample once."""
    steps = Steps()
    arguments = dict(trace=TRACE, callbacks=[steps], variant=variant, local_epochs=2, batch_size=2)
    history = follow(PerFedAvg, loss=LOSS, engine=engine, **arguments, **RATES)
    calls = 2 if variant == "FO" else 4
    batches, orders = [], []
    for cohort, by_client in zip(TRACE, steps.batches(problem), strict=True):
        batches.append({})
        for i in cohort:
            count = 2 * -(-SIZES[i] // 2)
            kinds = [by_client[i][kind::calls] for kind in range(calls)]
            assert [len(kind) for kind in kinds] == [count] * calls
            for kind in kinds:
                epoch = np.concatenate(kind[: count // 2])
                assert sorted(epoch.tolist()) == list(range(SIZES[i]))
            if variant == "HF":
                assert all(map(np.array_equal, kinds[2], kinds[3]))
            if i == 0:
                orders.append([tuple(np.concatenate(kind)) for kind in kinds[:3]])
            d1, d2, d3 = kinds[:3] if variant == "HF" else (*kinds, [None] * count)
            batches[-1][i] = list(zip(d1, d2, d3, strict=True))
    # Independent orders: two orders of 2 x 7 samples are not equal by chance.
    assert all(len(set(three)) == min(calls, 3) for three in orders)
    expected = per_fedavg(problem, START, batches, variant, **RATES)
    np.testing.assert_allclose(history["w"], expected, rtol=0, atol=1e-11)


# ---- where it ends ------------------------------------------------------------------------------

OPTIMA, CURVATURES = np.array([0.0, 1.0, 4.0]), np.array([4.0, 1.0, 0.5])
ALPHA = 0.2


def fixed_point(k):
    """Client i moves by β k_i (A_i - w) in its one step; at rest these moves cancel."""
    return (k * OPTIMA).sum() / k.sum()


# After adaptation A_i is 1 - α a_i times as far away: the gradient there is
# a_i (1 - α a_i) (w - A_i), and HF multiplies it by 1 - α a_i once more.
LIMITS = {
    "FO": fixed_point(CURVATURES * (1 - ALPHA * CURVATURES)),
    "HF": fixed_point(CURVATURES * (1 - ALPHA * CURVATURES) ** 2),
}


@VARIANTS
def test_the_variants_have_different_limits(fit, variant):
    """One local step. The curvatures 4, 1, 0.5 become 0.8, 0.8, 0.45 (FO): w = 2.6 / 2.05; and
    0.16, 0.64, 0.405 (HF): w = 2.26 / 1.205."""
    exact = {"FO": 2.6 / 2.05, "HF": 2.26 / 1.205}
    assert LIMITS[variant] == pytest.approx(exact[variant], rel=1e-12)
    arguments = dict(variant=variant, alpha=ALPHA, lr=1.0, batch_size=None, loss=LOSS)
    algorithm = PerFedAvg(scalar_problem(OPTIMA, CURVATURES).network(0.3), **arguments)
    fit(algorithm, scalar_problem(OPTIMA, CURVATURES), 50)
    assert float(algorithm.global_model) == pytest.approx(exact[variant], abs=1e-9)


def test_only_hf_minimizes_the_mean_after_adaptation():
    """mean_i f_i(w - α f_i'(w)), by brute force on a fine grid."""
    w = np.linspace(0.0, 4.0, 40_001)[:, None]
    adapted = w - ALPHA * CURVATURES * (w - OPTIMA)
    best = w[(CURVATURES / 2 * (adapted - OPTIMA) ** 2).mean(1).argmin(), 0]
    assert best == pytest.approx(LIMITS["HF"], abs=1e-4)
    assert abs(best - LIMITS["FO"]) > 0.5


@pytest.mark.parametrize("delta", [1e-4, 1.0, 50.0])
def test_the_difference_is_exact_on_quadratics_for_any_delta(watch, problem, delta):
    """The gradient is affine: [g(w + δ q) - g(w - δ q)] / (2 δ) = H q for every δ."""
    algorithm = PerFedAvg(
        problem.network(START), **RATES, delta=delta, local_steps=2, batch_size=None, loss=LOSS
    )
    history = watch(algorithm, problem, 3)
    expected = per_fedavg(problem, START, full(2, [ALL] * 3), "HF", **RATES)
    np.testing.assert_allclose(history["w"], expected, rtol=0, atol=1e-9)


@VARIANTS
def test_without_adaptation_it_is_fedavg(follow, variant):
    """α so small that w - α g is w."""
    plain = dict(lr=0.1, lr_decay=0.9, weight_decay=0.1, local_steps=3, batch_size=None, loss=LOSS)
    ours = follow(PerFedAvg, trace=TRACE, alpha=1e-30, variant=variant, **plain)
    theirs = follow(FedAvg, trace=TRACE, weighting="uniform", **plain)
    np.testing.assert_allclose(ours["w"], theirs["w"], rtol=0, atol=1e-13)


class Doubling(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def forward(self, x):
        return x.mul_(2) if self.in_place else 2 * x


def test_a_network_that_changes_its_inputs_is_trained_on_them_as_they_were(fit, problem):
    """D3 goes through the network twice, for both gradients of the difference."""
    models = []
    for in_place in (True, False):
        network = nn.Sequential(Doubling(in_place), problem.network(START))
        method = PerFedAvg(network, **RATES, local_steps=2, batch_size=None, loss=LOSS)
        models.append(fit(method, problem, 2).global_model)
    np.testing.assert_allclose(*models, rtol=0, atol=1e-13)


@VARIANTS
def test_running_statistics_follow_the_first_of_the_gradients(fit, variant):
    """One step on all samples takes the mean from 0 by a tenth to that of the inputs, however many
    gradients it has."""
    problem = least_squares((6,))
    network = nn.Sequential(nn.BatchNorm1d(problem.features[0].shape[1]), problem.network())
    arguments = dict(variant=variant, local_steps=1, batch_size=None, loss=LOSS)
    fit(PerFedAvg(network.double(), **arguments), problem, 1)
    expected = problem.features[0].mean(0) / 10
    np.testing.assert_allclose(network[0].running_mean, expected, rtol=0, atol=1e-13)


# ---- what it costs, and what is evaluated -------------------------------------------------------


@pytest.mark.parametrize(("variant", "gradients"), [("FO", 2), ("HF", 4)])
def test_sample_gradients_and_bytes(watch, problem, variant, gradients):
    """An epoch has 2 or 4 gradients of every sample; the model goes down and up, 8 bytes a value.
    The adaptation for an evaluation is not counted."""
    algorithm = PerFedAvg(problem.network(START), variant=variant, batch_size=2, loss=LOSS)
    history = watch(algorithm, problem, 1, trace=[[0, 2]])
    assert algorithm.progress.samples == gradients * (SIZES[0] + SIZES[2])
    adapted(algorithm)
    assert algorithm.progress.samples == gradients * (SIZES[0] + SIZES[2])
    assert algorithm.cost(np.array(SIZES)).tolist() == [gradients * n for n in SIZES]
    for way in ("down", "up"):
        assert history[way].tolist() == [[8 * problem.size, 0, 8 * problem.size, 0]]


def test_a_difference_needs_a_width(problem):
    with refused("model.delta: 0.0; it must be positive"):
        PerFedAvg(problem.network(START), delta=0.0)


def adapted(algorithm):
    """The personalized models of all clients, [M, P]."""
    models = np.full((algorithm.num_clients, algorithm.space.size), np.nan)
    for clients in algorithm.iter_clients():
        models[clients.ids] = algorithm.personalized(clients).numpy()
    return models


@pytest.mark.parametrize(("steps", "batch_size"), [(1, None), (3, None), (3, 2)])
def test_the_personalized_model_is_adapted_with_alpha(fit, problem, steps, batch_size):
    """w - α g_i(w), also for client 1, which never took part; w stays as it is. With mini-batches
    a step takes one of them, and not an epoch: client 0 has four."""
    seen = Steps()
    algorithm = PerFedAvg(
        problem.network(START), **RATES, adaptation_steps=steps, batch_size=batch_size, loss=LOSS
    )
    fit(algorithm, problem, 2, callbacks=[seen], trace=[[0, 2], [3]])
    w = algorithm.global_model.numpy().copy()
    seen.rounds.append([])
    models, expected = adapted(algorithm), []
    for i, batches in enumerate(seen.batches(problem)[-1]):
        v = w.copy()
        assert len(batches) == steps
        for samples in batches:
            v -= RATES["alpha"] * (problem.gradient(i, v, samples) + RATES["weight_decay"] * v)
        expected.append(v)
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(algorithm.global_model, w)
    assert algorithm.has_personalized  # so that evaluations score it
    for clients in algorithm.iter_clients():
        for rule in (algorithm.adaptation_start, algorithm.newcomer):
            np.testing.assert_array_equal(rule(clients), np.tile(w, (len(clients), 1)))
