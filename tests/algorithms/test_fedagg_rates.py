"""FedAgg's rates: that they solve the stated control problem, and their closed forms."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from models import HalfSquaredError
from pfl.algorithms import FedAgg
from tests.algorithms import reference_agg_acs as reference
from tests.algorithms.reference_agg_acs import rates_by_round
from tests.problems import least_squares, matrix_problem, scalar_problem

FULL = dict(batch_size=None, loss=HalfSquaredError())


# ---- the reference itself ------------------------------------------------------------------


@pytest.fixture(params=range(4))
def control(request):
    """A random state, gradients and path: (w, φ1, φ2)."""
    rng = np.random.default_rng(request.param)
    n = request.param + 1
    return rng.normal(size=6), rng.normal(size=(n, 6)), rng.normal(size=(n + 1, 6))


def test_feedback_is_the_open_loop_under_the_aggregated_dynamics(control):
    """On w_{l+1} = w_l - η_l φ_l the trailing problems have the tail of the first solution."""
    w, phi, path = control
    eta = reference.best_rates(w, phi, path, 0.1)
    for k, v in enumerate(reference.walk(w, phi, eta)[:-1]):
        tail = reference.best_rates(v, phi[k:], path[k:], 0.1)
        np.testing.assert_allclose(tail, eta[k:], atol=1e-12)


def test_the_last_two_epochs_have_the_papers_closed_forms(control):
    """η_{L-1} is the paper's (27); η_{L-2} is (28) without its errata."""
    w, phi, path = control
    c = 0.9 / 0.1
    a1 = phi[-1]
    last = c * a1 @ (w - path[-1]) / (1 + c * a1 @ a1)
    assert reference.best_rates(w, phi[-1:], path[-2:], 0.1)[0] == pytest.approx(last, abs=1e-12)
    if len(phi) > 1:
        a2, z4 = phi[-2], c * a1 @ a1
        bracket = 2 * w - path[-2] - path[-1] - c * a1 * (a1 @ (w - path[-1])) / (1 + z4)
        below = 1 + 2 * c * a2 @ a2 - c**2 * (a1 @ a2) ** 2 / (1 + z4)
        actual = reference.best_rates(w, phi[-2:], path[-3:], 0.1)[0]
        assert actual == pytest.approx(c * a2 @ bracket / below, abs=1e-12)


# ---- the method's rates for any terms -----------------------------------------------------------


class Terms(pl.Callback):
    """Gives the server terms of our own before a round (from 0)."""

    def __init__(self, round_index, **terms):
        self.round, self.terms = round_index, terms

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.round:
            for name, values in self.terms.items():
                getattr(pl_module, name).copy_(torch.from_numpy(values))


def drawn(epochs):
    """A problem, a start, and terms φ1 and φ2 that no training gave."""
    problem, rng = least_squares((6, 4, 9), bias=True, seed=2), np.random.default_rng(epochs)
    start = rng.normal(size=problem.size)
    phi = 0.5 * rng.normal(size=(epochs, problem.size))
    path = reference.walk(start, phi, rng.uniform(0.1, 1.2, epochs))
    return problem, start, phi, path + 0.1 * rng.normal(size=path.shape)


DRAWN = dict(lr=0.05, max_rate=0.6, mean_field="fixed_point")


@pytest.mark.parametrize(
    "dynamics, engine", [("own", "sequential"), ("own", "vmap"), ("aggregated", "sequential")]
)
@pytest.mark.parametrize("epochs", [1, 2, 3, 5])
def test_rates_solve_the_control_problem_for_any_terms(watch, epochs, dynamics, engine):
    """The rates of the next round are the optimal feedback at each client's own w_l, clipped."""
    problem, start, phi, path = drawn(epochs)
    arguments = dict(rate_penalty=0.2, local_epochs=epochs, tolerance=1e-12, dynamics=dynamics)
    algorithm = FedAgg(problem.network(start), engine=engine, **arguments, **DRAWN, **FULL)
    # The method keeps φ2_1 ... φ2_L, and keeps them less the received model.
    terms = Terms(1, gradients=phi, path=path[1:] - start)
    history = watch(algorithm, problem, 2, callbacks=[terms])
    np.testing.assert_array_equal(history["w"], [start] * 2)  # an iteration moves only the terms
    settings = DRAWN | dict(epochs=epochs, penalty=0.2, dynamics=dynamics)
    (expected,) = reference.fedagg(problem, start, [[0, 1, 2]], terms=(phi, path), **settings)
    actual = rates_by_round(algorithm)[1]
    for i in range(3):
        np.testing.assert_allclose(actual[i], expected["rates"][i], rtol=0, atol=1e-11)
    np.testing.assert_allclose(history["gradients"][1], expected["gradients"], rtol=0, atol=1e-11)
    moved = expected["path"][1:] - start
    np.testing.assert_allclose(history["path"][1], moved, rtol=0, atol=1e-11)
    for epoch in range(epochs):
        mean = np.mean([expected["rates"][i][epoch] for i in range(3)])
        logged = float(algorithm.trainer.callback_metrics[f"rate/{epoch}"])
        assert logged == pytest.approx(mean, rel=1e-6)


def test_the_drawn_terms_reach_both_bounds():
    """The test above sees rates inside the bounds and at both of them."""
    seen = []
    for epochs in (1, 2, 3, 5):
        problem, start, *terms = drawn(epochs)
        settings = DRAWN | dict(epochs=epochs, penalty=0.2, terms=terms)
        (row,) = reference.fedagg(problem, start, [[0, 1, 2]], **settings)
        seen += [rate for own in row["rates"].values() for rate in own]
    assert 0.0 in seen and 0.6 in seen
    assert sum(0 < rate < 0.6 for rate in seen) > 10


# ---- closed forms -------------------------------------------------------------------------------


def test_one_epoch_by_hand(watch):
    """L = 1: φ2_1 = w - η_base φ, so that η = η_base c φ² / (1 + c φ²) for everyone, with φ of the
    last round; w moves by the sample-weighted gradient, φ is the plain mean."""
    optima, a, copies = np.array([0.0, 1.0, 4.0]), np.array([2.0, 1.0, 0.5]), np.array([1, 2, 5])
    problem = scalar_problem(optima, a, copies)
    algorithm = FedAgg(problem.network(3.0), lr=0.3, rate_penalty=0.2, local_epochs=1, **FULL)
    history = watch(algorithm, problem, 6)
    w, eta, c = 3.0, 0.3, 0.8 / 0.2
    for t in range(6):
        g = a * (w - optima)
        w, phi = w - eta * (copies * g).sum() / copies.sum(), g.mean()
        assert history["w"][t][0] == pytest.approx(w, abs=1e-12)
        assert history["gradients"][t].item() == pytest.approx(phi, abs=1e-12)
        eta = 0.3 * c * phi**2 / (1 + c * phi**2)


class Inner(nn.Module):
    """<output, target>: the gradient is the same at every model."""

    def forward(self, outputs, targets):
        return (outputs * targets).flatten(1).sum(1)


@pytest.fixture(scope="module")
def constant():
    """Four clients with f_i(w) = <G_i, w>, and the G_i."""
    problem = least_squares((5, 8, 3, 6), seed=7)
    pairs = zip(problem.features, problem.targets, strict=True)
    return problem, np.stack([(y.T @ x).ravel() / len(x) for x, y in pairs])


def contraction(g, epochs, penalty):
    """(I + cM)^-1 cM for φ1 = g in every epoch."""
    m = (
        (1 - penalty)
        / penalty
        * (g @ g)
        * np.array([[epochs - max(r, s) for s in range(epochs)] for r in range(epochs)])
    )
    return np.linalg.solve(np.eye(epochs) + m, m)


@pytest.mark.parametrize("damping", [1, 2, 5])
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_constant_gradients_have_the_open_loop_rates(watch, constant, epochs, damping):
    """J damping steps give η = [(I+cM)^-1 cM]^J η_base under constant φ1; everyone moves
    by the same Σ η_l φ1."""
    problem, gradients = constant
    g = gradients.mean(0)
    arguments = dict(lr=0.2, rate_penalty=0.6, damping_steps=damping, local_epochs=epochs)
    algorithm = FedAgg(
        problem.network(0.3), dynamics="aggregated", batch_size=None, loss=Inner(), **arguments
    )
    history = watch(algorithm, problem, 3)
    step = np.linalg.matrix_power(contraction(g, epochs, 0.6), damping)
    eta = step @ np.full(epochs, 0.2)
    actual = rates_by_round(algorithm)
    for t in (1, 2):
        np.testing.assert_allclose([actual[t][i] for i in range(4)], [eta] * 4, atol=1e-12)
    # Nobody has a term to move by yet; the mean of equal models may round.
    np.testing.assert_allclose(history["w"][0], 0.3, rtol=0, atol=1e-15)
    for t in (1, 2):
        expected = 0.3 - t * eta.sum() * g
        np.testing.assert_allclose(history["w"][t], expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(history["gradients"][t], [g] * epochs, rtol=0, atol=1e-12)


def test_equal_clients_follow_the_open_loop_with_their_own_gradients(watch):
    """Where all gradients are the same constant, own and aggregated dynamics are one: only the
    first round, which has no term yet, differs."""
    problem = least_squares((5,), seed=7)
    x, y = problem.features[0], problem.targets[0]
    g = (y.T @ x).ravel() / len(x)
    settings = dict(lr=0.2, rate_penalty=0.6, local_epochs=3, batch_size=None, loss=Inner())
    history = watch(FedAgg(problem.network(0.3), **settings), problem, 3)
    eta = contraction(g, 3, 0.6) @ np.full(3, 0.2)
    for t in range(3):
        expected = 0.3 - (3 * 0.2 + t * eta.sum()) * g
        np.testing.assert_allclose(history["w"][t], expected, rtol=0, atol=1e-12)


# ---- the fixed point ----------------------------------------------------------------------------


def test_the_mean_field_shrinks_the_rate_geometrically(watch):
    """L = 1, full gradients: φ1 is the mean gradient at w in every iteration, and
    η <- c|φ|²/(1 + c|φ|²) η; the model stays where it is."""
    problem = least_squares((6, 3, 9), bias=True, seed=4)
    arguments = dict(lr=0.1, rate_penalty=0.5, local_epochs=1, mean_field="fixed_point")
    algorithm = FedAgg(problem.network(0.2), tolerance=1e-12, **arguments, **FULL)
    history = watch(algorithm, problem, 8)
    w = np.full(problem.size, 0.2)
    phi = np.mean([problem.gradient(i, w) for i in range(3)], axis=0)
    q = phi @ phi / (1 + phi @ phi)
    assert 0.05 < q < 0.95
    for t, actual in rates_by_round(algorithm).items():
        np.testing.assert_allclose([actual[i][0] for i in range(3)], 0.1 * q**t, atol=1e-13)
    np.testing.assert_array_equal(history["w"], 0.2)


@pytest.mark.parametrize("dynamics", ["own", "aggregated"])
def test_the_exact_mean_field_does_not_train(watch, dynamics):
    """η = 0 is the equilibrium."""
    problem = matrix_problem(np.random.default_rng(3).normal(size=(3, 2, 2)))
    arguments = dict(lr=0.1, rate_penalty=0.7, mean_field="fixed_point", dynamics=dynamics)
    algorithm = FedAgg(problem.network(0.2), tolerance=1e-30, **arguments, **FULL)
    history = watch(algorithm, problem, 30)
    actual = rates_by_round(algorithm)
    assert np.max([actual[29][i] for i in range(3)]) < 1e-6
    np.testing.assert_allclose(history["w"], 0.2, rtol=0, atol=1e-9)


@pytest.mark.parametrize("settled", [2, 4, 9])
def test_the_model_moves_once_both_terms_have_settled(watch, settled):
    """L = 1: φ1 stays from the second iteration on, φ2_1 changes in iteration j (from 0) by
    (1 - q) q^(j-1) η_base |φ|; then w takes the sample-weighted mean step of rate η_base q^j."""
    problem = least_squares((6, 3, 9), bias=True, seed=4)
    w = np.full(problem.size, 0.2)
    gradients = np.stack([problem.gradient(i, w) for i in range(3)])
    phi = gradients.mean(0)
    q = 0.25 * phi @ phi / (1 + 0.25 * phi @ phi)
    assert 0.3 < q < 0.8
    algorithm = FedAgg(
        problem.network(0.2),
        lr=0.1,
        rate_penalty=0.8,
        local_epochs=1,
        mean_field="fixed_point",
        # between the changes of the iterations `settled` - 1 and `settled`
        tolerance=float((1 - q) * q ** (settled - 1.5) * 0.1 * np.linalg.norm(phi)),
        **FULL,
    )
    history = watch(algorithm, problem, settled + 1)
    np.testing.assert_array_equal(history["w"][:settled], np.tile(w, (settled, 1)))
    expected = w - 0.1 * q**settled * (problem.sizes @ gradients) / problem.sizes.sum()
    np.testing.assert_allclose(history["w"][settled], expected, rtol=0, atol=1e-12)
    assert np.abs(expected - w).max() > 1e-4
