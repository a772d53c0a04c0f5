"""Where FedPD ends, and what it is the same as: closed forms, FedDyn and FedSLR, FedAvg's bias."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models import HalfSquaredError
from pfl.algorithms import FedAvg, FedPD
from tests.algorithms import reference_clup_pd as reference
from tests.problems import least_squares, owned, scalar_problem

LOSS = HalfSquaredError()
FULL = dict(batch_size=None, loss=LOSS)


# ---- the fixed point ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def problem():
    """Clients of unequal size, each with a Hessian of its own; they do not weigh by size."""
    return least_squares((30, 12, 20), d=2, o=2, seed=6)


def assert_optimal(problem, row, atol):
    """x_i = x_0 = argmin mean f_i, and λ_i = -grad f_i there, which are not 0 but cancel."""
    optimum = reference.minimizer(problem)
    np.testing.assert_allclose(row["w"], optimum, rtol=0, atol=atol)
    np.testing.assert_allclose(row["x"], np.tile(optimum, (3, 1)), rtol=0, atol=10 * atol)
    gradients = [problem.gradient(i, optimum) for i in range(problem.num_clients)]
    assert np.abs(gradients).min(1).max() > 0.1
    np.testing.assert_allclose(-row["lam"], gradients, rtol=0, atol=100 * atol)
    np.testing.assert_allclose(row["lam"].mean(0), 0.0, rtol=0, atol=100 * atol)


@pytest.mark.parametrize(
    ("eta", "lr", "steps", "rounds"), [(0.2, 0.1, 1, 160), (0.5, 0.2, 3, 45), (2.0, 0.3, 8, 65)]
)
def test_the_limit_of_inexact_gradient_descent_is_the_optimum(
    watch, problem, eta, lr, steps, rounds
):
    """The warm start makes it so: the optimum is where nothing moves, however few the steps."""
    algorithm = FedPD(problem.network(0.5), proximal_step=eta, lr=lr, local_steps=steps, **FULL)
    history = watch(algorithm, problem, rounds)
    assert_optimal(problem, history.rounds[-1], 1e-7)


@pytest.mark.parametrize(("gamma", "batch_size"), [(None, None), (None, 4), (0.5, 4)])
def test_the_limit_of_variance_reduction_is_the_optimum(watch, problem, gamma, batch_size):
    """Samples disagree at the optimum, but their gradients do not change there: no noise is left.
    Mini-batches of a constant step without variance reduction stay noisy."""
    arguments = dict(proximal_step=0.3, local_steps=3, batch_size=batch_size, refresh_period=3)
    algorithm = FedPD(
        problem.network(0.5), variance_reduction=True, inner_step=gamma, loss=LOSS, **arguments
    )
    history = watch(algorithm, problem, 75)
    assert_optimal(problem, history.rounds[-1], 1e-6)


def test_plain_mini_batches_stay_noisy(watch, problem):
    algorithm = FedPD(
        problem.network(0.5), proximal_step=0.1, lr=0.05, local_steps=3, batch_size=4, loss=LOSS
    )
    history = watch(algorithm, problem, 60)
    off = np.abs(history["w"][30:] - reference.minimizer(problem)).max(1)
    assert 1e-3 < off.mean() < 1.0


@pytest.mark.parametrize("eta", [0.2, 1.5])
def test_the_exact_oracle_gives_the_dual_and_the_global_step(watch, problem, eta):
    """Exact local solves: λ_i = -grad f_i(x_i) after every round, so that
    x_0 = mean x_i - η mean grad f_i(x_i)."""
    smooth, convex = reference.constants(problem)
    start = np.array([1.0, -1.0, 0.5, 2.0])
    # Steps of 2 / (curvature's range): each leaves less than 1/2 of the distance.
    rate = 2 / (smooth + convex + 2 / eta)
    assert (smooth - convex) * rate / 2 < 0.6
    algorithm = FedPD(problem.network(start), proximal_step=eta, lr=rate, local_steps=60, **FULL)
    history = watch(algorithm, problem, 4)
    x_0 = start
    for row in history.rounds:
        g = np.array([problem.gradient(i, x) for i, x in enumerate(row["x"])])
        np.testing.assert_allclose(row["lam"], -g, rtol=0, atol=1e-9)
        np.testing.assert_allclose(row["w"], (row["x"] - eta * g).mean(0), rtol=0, atol=1e-9)
        # With the dual of the round before, x_i minimizes the augmented Lagrangian.
        before = row["lam"] - (row["x"] - x_0) / eta
        np.testing.assert_allclose(g + before + (row["x"] - x_0) / eta, 0.0, rtol=0, atol=1e-9)
        x_0 = row["w"]


def test_a_client_without_samples_has_no_say(watch, problem):
    """Its f_i is 0: exactly solved it follows x_0 with λ_i = 0, and the others' optimum holds."""
    data = reference.with_an_idle_client(problem)
    algorithm = FedPD(problem.network(0.5), proximal_step=0.5, lr=0.2, local_steps=3, **FULL)
    history = watch(algorithm, data, 70)
    optimum = reference.minimizer(problem)
    np.testing.assert_allclose(history["w"][-1], optimum, rtol=0, atol=1e-6)
    np.testing.assert_allclose(history["lam"][-1, 3], 0.0, rtol=0, atol=1e-6)


# ---- against FedAvg -----------------------------------------------------------------------------

OPTIMA, CURVATURES = np.array([0.0, 1.0, 3.0]), np.array([4.0, 1.0, 0.5])


def test_fedavg_is_biased_where_fedpd_is_not(fit):
    """f_i = a_i/2 (x - A_i)². Q steps of FedAvg take x to A_i + (1 - η a_i)^Q (x - A_i), so its
    fixed point is sum c_i A_i / sum c_i with c_i = 1 - (1 - η a_i)^Q; the optimum has a_i there."""
    lr, steps, problem = 0.2, 4, scalar_problem(OPTIMA, CURVATURES)
    c = 1 - (1 - lr * CURVATURES) ** steps
    biased, optimum = c @ OPTIMA / c.sum(), CURVATURES @ OPTIMA / CURVATURES.sum()
    assert abs(biased - optimum) > 0.3
    common = dict(lr=lr, local_steps=steps, **FULL)
    average = FedAvg(problem.network(5.0), weighting="uniform", **common)
    fit(average, problem, 40)
    assert float(average.global_model) == pytest.approx(biased, abs=1e-9)
    descent = FedPD(problem.network(5.0), proximal_step=0.5, **common)
    arguments = dict(proximal_step=0.15, local_steps=2, variance_reduction=True, refresh_period=3)
    reduced = FedPD(problem.network(5.0), batch_size=1, loss=LOSS, **arguments)
    for algorithm, rounds in ((descent, 30), (reduced, 85)):
        fit(algorithm, problem, rounds)
        assert float(algorithm.global_model) == pytest.approx(optimum, abs=1e-6)


class Signed(nn.Module):
    """sign · output² / 2, where the target is the sign: a concave client has -1."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (0.5 * targets * outputs.square()).flatten(1).sum(1)


def opposed():
    """f_+ = x²/2 and f_- = -x²/2: one sample each, whose input is 1."""
    signs = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    return owned(np.arange(2), torch.ones_like(signs), signs)


def one_weight(value):
    network = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(network.weight, value)
    return network


@pytest.mark.parametrize("steps", [2, 5])
def test_fedavg_diverges_on_opposed_clients(watch, steps):
    """Every round multiplies by ((1 - η)^Q + (1 + η)^Q) / 2 > 1, although the mean of the
    objectives is 0 everywhere."""
    lr, rounds = 0.5, 12
    settings = dict(lr=lr, local_steps=steps, batch_size=None, loss=Signed())
    history = watch(FedAvg(one_weight(1.0), **settings), opposed(), rounds)
    factor = ((1 - lr) ** steps + (1 + lr) ** steps) / 2
    np.testing.assert_allclose(history["w"][:, 0], factor ** np.arange(1, rounds + 1), rtol=1e-12)
    assert history["w"][-1, 0] > 10


@pytest.mark.parametrize("eta", [0.3, 0.6])
def test_fedpd_settles_on_opposed_clients(watch, eta):
    """Exact solves give x_± = (x_0 - η λ_±) / (1 ± η) and λ_± = ∓ x_±. From λ = 0 the first round
    ends at x_± = x_0 / (1 ± η); then both become the mean of the last x_±, for every η < 1, so they
    stay at w_0 / (1 - η²) from round 2 on, and so does x_0."""
    rounds, start = 5, 1.5
    # Curvatures of L_i are 1/η ± 1, so steps of η leave ± η of the distance.
    steps = int(np.ceil(np.log(1e-14) / np.log(eta)))
    settings = dict(lr=eta, local_steps=steps, batch_size=None, loss=Signed())
    history = watch(FedPD(one_weight(start), proximal_step=eta, **settings), opposed(), rounds)
    limit = start / (1 - eta**2)
    x, w = history["x"][:, :, 0], history["w"][:, 0]
    np.testing.assert_allclose(x[0], [start / (1 + eta), start / (1 - eta)], rtol=1e-10)
    assert w[0] == pytest.approx(start * (1 + eta**2) / (1 - eta**2), rel=1e-10)
    np.testing.assert_allclose(x[1:], limit, rtol=1e-9)
    np.testing.assert_allclose(w[1:], limit, rtol=1e-9)
    # The duals are the gradients: they are as large as ever, and cancel.
    np.testing.assert_allclose(history["lam"][1:, :, 0], [[-limit, limit]] * 4, rtol=1e-8)


@pytest.mark.parametrize(("matlab", "bounded"), [(False, True), (True, False)])
def test_the_matlab_form_diverges_there(matlab, bounded):
    """Section 5.4: at η = 0.6/L, with the same exact solves."""

    class Opposed:
        num_clients, size = 2, 1

        def gradient(self, i, x, samples=None):
            return x if i == 0 else -x

    talks, start = [True] * 60, np.array([1.5])
    history = reference.fedpd(Opposed(), start, talks, eta=0.6, lr=0.6, steps=70, matlab=matlab)
    assert (float(np.abs(history[-1]["w"][0])) < 10) == bounded


# ---- skipping -----------------------------------------------------------------------------------


def test_skipping_leaves_an_error_floor_for_different_clients(watch):
    """Without communication x_{0,i} drifts towards the client's own optimum. So mean x_{0,i} keeps
    a distance from the optimum with p > 0, and goes there with p = 0."""
    problem = scalar_problem(OPTIMA, CURVATURES)
    optimum = CURVATURES @ OPTIMA / CURVATURES.sum()
    errors = []
    for skipping in ({}, dict(skip_probability=0.5), dict(communication_period=2)):
        algorithm = FedPD(
            problem.network(5.0), proximal_step=0.5, lr=0.2, local_steps=4, **skipping, **FULL
        )
        history = watch(algorithm, problem, 40)
        errors.append(np.abs(history["w"][-12:, 0] - optimum))
    assert errors[0].max() < 1e-5
    for floor in errors[1:]:
        assert floor.mean() > 1e-2 and floor.max() < 5.0


def test_the_floor_is_proportional_to_the_square_of_the_curvatures_differences(watch):
    """With equal curvatures a round maps (x_i, λ_i, x_{0,i}, A_i) by one linear function, the same
    for all clients: their means do not depend on when clients communicate, however far optima are
    apart. Curvatures that differ by δ leave an error of the order δ, and δ² in |grad f|²."""
    same = dict(proximal_step=0.5, lr=0.2, local_steps=4, **FULL)
    paths, gaps = [], []
    for delta, p in ((0.0, 0.0), (0.0, 0.5), (0.01, 0.5), (0.02, 0.5)):
        problem = scalar_problem(OPTIMA, 1 + delta * np.array([1.0, 0.0, -1.0]))
        algorithm = FedPD(problem.network(5.0), skip_probability=p, **same)
        paths.append(watch(algorithm, problem, 60)["w"][:, 0])
        gradients = (1 + delta * np.array([1.0, 0.0, -1.0])) * (paths[-1][:, None] - OPTIMA)
        gaps.append(np.median(gradients.mean(1)[-30:] ** 2))
    np.testing.assert_allclose(paths[0], paths[1], rtol=0, atol=1e-12)
    assert gaps[0] < 1e-12 < gaps[2]
    assert gaps[3] / gaps[2] == pytest.approx(4, rel=0.1)


def test_between_communications_the_evaluated_model_is_the_mean_of_the_agents(watch, problem):
    """Also where agents have x_{0,i} of their own: after every round w = mean x_{0,i}."""
    algorithm = FedPD(
        problem.network(0.5), proximal_step=0.3, skip_probability=0.7, lr=0.1, local_steps=3, **FULL
    )
    history = watch(algorithm, problem, 12)
    x0 = history["x"] + 0.3 * history["lam"]
    np.testing.assert_allclose(history["x0"], x0, rtol=0, atol=1e-12)
    assert (np.ptp(x0, axis=1).max(1) > 0.01).all() and not history["common"].all()
    np.testing.assert_allclose(history["w"], x0.mean(1), rtol=0, atol=1e-12)
