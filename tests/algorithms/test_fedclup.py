"""FedCLUP round by round against NumPy, and where it ends and how fast against closed forms."""

from itertools import pairwise

import numpy as np
import pytest

from models import HalfSquaredError
from pfl.algorithms import FedCLUP
from tests.algorithms import reference_clup_pd as reference
from tests.algorithms.reference_clup_pd import assert_rounds
from tests.problems import Steps, least_squares, matrix_problem, scalar_problem

FULL = dict(batch_size=None, loss=HalfSquaredError())
EVERYONE = [[0, 1, 2, 3]] * 5
SAMPLED = [[0, 1], [1, 2, 3], [2], [0, 3], [1]]
BOTH_TRACES = pytest.mark.parametrize("trace", [EVERYONE, SAMPLED], ids=["full", "sampled"])


@pytest.fixture(scope="module")
def problem():
    """Clients of unequal size, a 3 x 2 matrix and 2 biases."""
    return least_squares((7, 2, 5, 3), bias=True, seed=3)


START = np.linspace(-1.0, 1.0, 8)


# ---- iterates -----------------------------------------------------------------------------------


@BOTH_TRACES
@pytest.mark.parametrize(
    ("lam", "gamma", "at_once"), [(0.3, 2.0, None), (0.3, 4.5, 1), (4.0, 0.25, None)]
)
def test_every_iterate_equals_numpy(watch, problem, trace, lam, gamma, at_once):
    arguments = dict(penalty=lam, server_step=gamma, lr=0.1, lr_decay=0.9, weight_decay=0.05)
    algorithm = FedCLUP(problem.network(START), local_steps=3, **arguments, **FULL)
    models = watch(algorithm, problem, 5, trace=trace, clients_at_once=at_once)
    expected = reference.fedclup(
        problem,
        START,
        trace,
        lam=lam,
        lr=lambda t: 0.1 * 0.9**t,
        move=gamma * lam,
        steps=3,
        weight_decay=0.05,
    )
    assert_rounds(models.rounds, expected, "w", "w_i")
    # Who has not taken part yet still has the common beginning.
    assert algorithm.has_global and algorithm.has_personalized
    absent = [i for i in range(4) if i not in trace[0]]
    np.testing.assert_array_equal(models["w_i"][0, absent], np.tile(START, (len(absent), 1)))


def share_of(server_step, lam, smooth):
    """γλ: γ = 1/λ, (λ + L) / (2λL), 1/L_g = 1/λ + 1/L, or a number."""
    return {
        "inverse_penalty": 1.0,
        "corollary2": (lam + smooth) / (2 * smooth),
        "inverse_smoothness": (lam + smooth) / smooth,
        1.7: 1.7 * lam,
    }[server_step]


@BOTH_TRACES
@pytest.mark.parametrize("local_step", ["lr", "corollary2"])
@pytest.mark.parametrize(
    "server_step", ["inverse_penalty", "corollary2", "inverse_smoothness", 1.7]
)
def test_local_and_server_rates_follow_their_rules(watch, problem, trace, server_step, local_step):
    """η: as given, or 1 / (λ + L); γ: as `share_of` says. L does not have to be the true one."""
    lam, smooth = 0.8, 6.0
    arguments = dict(penalty=lam, server_step=server_step, local_step=local_step, smoothness=smooth)
    algorithm = FedCLUP(problem.network(START), lr=0.1, local_steps=2, **arguments, **FULL)
    models = watch(algorithm, problem, 5, trace=trace)
    options = dict(lam=lam, lr=0.1 if local_step == "lr" else 1 / (lam + smooth), steps=2)
    expected = reference.fedclup(
        problem, START, trace, move=share_of(server_step, lam, smooth), **options
    )
    assert_rounds(models.rounds, expected, "w", "w_i")


@BOTH_TRACES
def test_clients_may_weigh_by_their_samples(watch, problem, trace):
    """As in the released MNIST code; the default is the theory's unweighted mean."""
    settings = dict(lr=0.1, steps=3)
    algorithm = FedCLUP(
        problem.network(START), penalty=0.6, lr=0.1, local_steps=3, weighting="samples", **FULL
    )
    models = watch(algorithm, problem, 5, trace=trace)
    expected = reference.fedclup(
        problem, START, trace, lam=0.6, move=1.0, by_samples=True, **settings
    )
    assert_rounds(models.rounds, expected, "w", "w_i")
    uniform = reference.fedclup(problem, START, trace, lam=0.6, move=1.0, **settings)
    assert np.abs(uniform[-1]["w"] - expected[-1]["w"]).max() > 0.01


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
@pytest.mark.parametrize("passes", [dict(local_epochs=2), dict(local_steps=5)], ids=str)
@BOTH_TRACES
def test_mini_batches(watch, problem, trace, passes, engine):
    """Every local step has a batch of its own, over shuffled epochs."""
    steps = Steps()
    arguments = dict(penalty=0.6, server_step=1.2, lr=0.05, batch_size=3, engine=engine)
    algorithm = FedCLUP(problem.network(START), loss=HalfSquaredError(), **arguments, **passes)
    models = watch(algorithm, problem, 5, callbacks=[steps], trace=trace)
    batches = steps.batches(problem)
    counts = [2 * np.array([3, 1, 2, 1]), np.full(4, 5)]["local_steps" in passes]
    for cohort, actual in zip(trace, batches, strict=True):
        assert [len(b) for b in actual] == [counts[i] * (i in cohort) for i in range(4)]
    expected = reference.fedclup(
        problem, START, trace, lam=0.6, lr=0.05, move=1.2 * 0.6, steps=0, batches=batches
    )
    assert_rounds(models.rounds, expected, "w", "w_i")


@pytest.mark.parametrize("lam", [0.01, 0.5, 30.0])
@BOTH_TRACES
def test_with_the_inverse_penalty_the_global_model_is_the_mean(watch, problem, trace, lam):
    """γ = 1/λ: w = mean of the participants' w_i, whatever λ is; the others keep their w_i."""
    algorithm = FedCLUP(
        problem.network(START), penalty=lam, lr=0.1 / (1 + lam), local_steps=3, **FULL
    )
    models = watch(algorithm, problem, 5, trace=trace)
    before = np.tile(START, (4, 1))
    for cohort, row in zip(trace, models.rounds, strict=True):
        np.testing.assert_allclose(row["w"], row["w_i"][cohort].mean(0), rtol=0, atol=1e-13)
        absent = [i for i in range(4) if i not in cohort]
        np.testing.assert_array_equal(row["w_i"][absent], before[absent])
        assert (row["w_i"][cohort] != before[cohort]).any(1).all()
        before = row["w_i"]


def test_a_visit_sends_a_model_each_way(watch, problem):
    """w down and w_i up: 8 values of 8 bytes for everyone who takes part, nothing for others."""
    algorithm = FedCLUP(problem.network(START), lr=0.1, local_steps=1, **FULL)
    models = watch(algorithm, problem, 5, trace=SAMPLED)
    took_part = np.cumsum([[i in cohort for i in range(4)] for cohort in SAMPLED], axis=0)
    np.testing.assert_array_equal(models["down"], 64 * took_part)
    np.testing.assert_array_equal(models["up"], 64 * took_part)
    assert algorithm.personalization_penalty == 0.5


# ---- the solution -------------------------------------------------------------------------------


def quadratics(kind):
    if kind == "isotropic":
        optima = np.random.default_rng(2).normal(size=(4, 3, 2))
        return matrix_problem(optima, curvatures=[0.5, 1.0, 2.0, 1.2], copies=[1, 3, 1, 2])
    return least_squares((30, 20, 25), d=2, o=2, seed=6)


@pytest.mark.parametrize(("steps", "rounds"), [(1, 60), (3, 40), (10, 36)])
@pytest.mark.parametrize(
    ("kind", "server_step"), [("isotropic", "corollary2"), ("random", "inverse_penalty")]
)
def test_the_limit_does_not_depend_on_the_local_steps(watch, kind, server_step, steps, rounds):
    """grad L_i(w_i) + λ (w_i - w) = 0 and w = mean w_i, also when local solves are far from exact:
    the solution of problem (2), which is one linear system."""
    problem, lam = quadratics(kind), 1.0
    smooth, _ = reference.constants(problem)
    arguments = dict(penalty=lam, server_step=server_step, local_step="corollary2")
    algorithm = FedCLUP(
        problem.network(0.5), smoothness=smooth, local_steps=steps, **arguments, **FULL
    )
    models = watch(algorithm, problem, rounds)
    w, w_i = reference.coupled_minimizer(problem, lam)
    assert np.abs(w_i - w).max() > 0.1
    np.testing.assert_allclose(models["w"][-1], w, rtol=0, atol=1e-6)
    np.testing.assert_allclose(models["w_i"][-1], w_i, rtol=0, atol=1e-6)
    for i, row in enumerate(models["w_i"][-1]):
        residual = problem.gradient(i, row) + lam * (row - models["w"][-1])
        np.testing.assert_allclose(residual, 0.0, rtol=0, atol=1e-5)


OPTIMA, CURVATURES = np.array([0.0, 1.0, 4.0]), np.array([0.8, 1.2, 2.0])


def test_the_warm_start_matters(watch):
    """On f_i = a_i/2 (w - A_i)^2 the limit is sum h_i A_i / sum h_i with h_i = λ a_i / (λ + a_i).
    Were w_i set back to w in every round, K steps would end at w + c_i a_i (A_i - w) / (a_i + λ)
    with c_i = 1 - (1 - η (a_i + λ))^K, and the limit would have c_i h_i for h_i."""
    lam, lr, steps = 1.5, 0.25, 2
    problem = scalar_problem(OPTIMA, CURVATURES)
    algorithm = FedCLUP(problem.network(9.0), penalty=lam, lr=lr, local_steps=steps, **FULL)
    models = watch(algorithm, problem, 60)
    h = lam * CURVATURES / (lam + CURVATURES)
    c = 1 - (1 - lr * (CURVATURES + lam)) ** steps
    limit, with_reset = (h @ OPTIMA) / h.sum(), (c * h @ OPTIMA) / (c @ h)
    assert abs(limit - with_reset) > 0.1
    assert models["w"][-1, 0] == pytest.approx(limit, abs=1e-8)


def test_a_client_without_samples_has_no_say(watch):
    """Its f_i is 0, so that w_i = w minimizes its part whatever w is: the others' solution holds,
    and the common beginning, where it never moved from, does not pull."""
    problem = scalar_problem(OPTIMA, CURVATURES)
    data = reference.with_an_idle_client(problem)
    algorithm = FedCLUP(problem.network(9.0), penalty=1.5, lr=0.25, local_steps=3, **FULL)
    models = watch(algorithm, data, 80)
    w, w_i = reference.coupled_minimizer(problem, 1.5)
    np.testing.assert_allclose(models["w"][-1], w, rtol=0, atol=1e-6)
    np.testing.assert_allclose(models["w_i"][-1], [*w_i, w], rtol=0, atol=1e-5)


# ---- rates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.25, 1.0, 6.0])
@pytest.mark.parametrize(
    "server_step", ["inverse_penalty", "corollary2", "inverse_smoothness", 1.7]
)
def test_the_global_model_contracts_as_the_theory_says(watch, server_step, lam):
    """Exact inner solves of scalar quadratics: w - w* shrinks by 1 - γ mean h_i in every round,
    with its sign, and w_i = (a_i A_i + λ w) / (a_i + λ) for the w that was received."""
    smooth, start = CURVATURES.max(), -3.0
    problem = scalar_problem(OPTIMA, CURVATURES)
    # The slowest client keeps this share of its error in a step.
    kept = 1 - (CURVATURES.min() + lam) / (smooth + lam)
    algorithm = FedCLUP(
        problem.network(start),
        penalty=lam,
        server_step=server_step,
        local_step="corollary2",
        smoothness=smooth,
        local_steps=int(np.ceil(np.log(1e-12) / np.log(kept))),
        **FULL,
    )
    models = watch(algorithm, problem, 4)
    h = lam * CURVATURES / (lam + CURVATURES)
    limit = (h @ OPTIMA) / h.sum()
    factor = 1 - share_of(server_step, lam, smooth) / lam * h.mean()
    expected = limit + factor ** np.arange(5) * (start - limit)
    np.testing.assert_allclose(models["w"][:, 0], expected[1:], rtol=0, atol=1e-10)
    own = (CURVATURES * OPTIMA + lam * expected[:-1, None]) / (CURVATURES + lam)
    np.testing.assert_allclose(models["w_i"][:, :, 0], own, rtol=0, atol=1e-10)


@pytest.mark.parametrize("lam", [0.3, 3.0])
def test_the_rate_that_corollary_2_guarantees(watch, lam):
    """|w - w*|^2 falls at least by 1 - (λ + L) / (4 κ (λ + μ)) in a round, with Corollary 2's steps
    and number of local steps K >= 2 + (λ + L) / (λ + μ) log(1056 κ^2)."""
    problem = least_squares((60, 50, 70), d=2, o=1, seed=11)
    smooth, convex = reference.constants(problem)
    kappa = smooth / convex
    steps = int(np.ceil(2 + (lam + smooth) / (lam + convex) * np.log(1056 * kappa**2)))
    arguments = dict(penalty=lam, server_step="corollary2", local_step="corollary2")
    algorithm = FedCLUP(
        problem.network(3.0), smoothness=smooth, local_steps=steps, **arguments, **FULL
    )
    models = watch(algorithm, problem, 6)
    w, _ = reference.coupled_minimizer(problem, lam)
    errors = [((row - w) ** 2).sum() for row in [np.full(2, 3.0), *models["w"]]]
    rate = 1 - (lam + smooth) / (4 * kappa * (lam + convex))
    assert kappa > 1.5 and 0.5 < rate < 1
    for before, after in pairwise(errors):
        assert after <= rate * before
    # The true rate is that of (1 - γ H)^2 with H the mean of λ H_i (H_i + λ)^-1.
    eye, parts = np.eye(2), [reference.hessian(problem, i) for i in range(3)]
    mean = np.mean([lam * part @ np.linalg.inv(part + lam * eye) for part in parts], axis=0)
    gamma = (lam + smooth) / (2 * lam * smooth)
    slowest = (1 - gamma * np.linalg.eigvalsh(mean)[0]) ** 2
    assert slowest <= rate
    for before, after in pairwise(errors):
        assert after <= slowest * before * (1 + 1e-6)


# ---- both ends ----------------------------------------------------------------------------------


def test_without_a_penalty_a_given_server_step_leaves_the_global_model(fit, problem):
    """w <- w - γ mean λ (w - w_i)."""
    algorithm = FedCLUP(
        problem.network(START), penalty=0.0, server_step=3.0, lr=0.1, local_steps=2, **FULL
    )
    fit(algorithm, problem, 3)
    np.testing.assert_allclose(algorithm.global_model, START, rtol=0, atol=1e-15)


def test_a_large_penalty_approaches_the_global_problem(watch):
    """The solutions are within O(1/λ) of argmin mean f_i: 10 times the λ, a tenth the distance."""
    problem, distances = least_squares((30, 20, 25), d=2, o=2, seed=6), []
    smooth, _ = reference.constants(problem)
    optimum = reference.minimizer(problem)
    assert np.abs(optimum - 0.5).max() > 0.3
    for lam in (1e2, 1e3):
        algorithm = FedCLUP(
            problem.network(0.5),
            penalty=lam,
            server_step="corollary2",  # γ -> 1 / (2L): does not fade with λ, as 1/λ would
            local_step="corollary2",
            smoothness=smooth,
            local_steps=2,
            **FULL,
        )
        models = watch(algorithm, problem, 75)
        w, w_i = reference.coupled_minimizer(problem, lam)
        np.testing.assert_allclose(models["w"][-1], w, rtol=0, atol=1e-8)
        np.testing.assert_allclose(models["w_i"][-1], w_i, rtol=0, atol=1e-8)
        spread = np.abs(models["w_i"][-1] - optimum).max()
        distances.append([np.abs(models["w"][-1] - optimum).max(), spread])
    ratio = np.array(distances[0]) / distances[1]
    assert (np.abs(ratio - 10) < 1).all()
    assert max(distances[1]) < 0.01
