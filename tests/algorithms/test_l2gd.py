"""L2GD against the paper's loop, coin by coin; its coins, its problem, and its ends."""

from itertools import product

import numpy as np
import pytest
import torch

from pfl.algorithms import L2GD, FedAvg, LocalTrain
from pfl.callbacks import LocalBaseline
from tests.algorithms import closed_forms as forms
from tests.algorithms import reference_clup_pd as reference
from tests.algorithms.methods import small_network, small_world
from tests.algorithms.traced import ALL, FULL, LOSS, RATES, SIZES, START
from tests.problems import History
from tests.refusal import refused

P, PENALTY = 0.3, 0.6
ROUNDS = 8
COINS = dict(penalty=PENALTY, averaging_probability=P)


# ---- the paper's loop ---------------------------------------------------------------------------


def step(problem, x, coin, alpha, weight_decay=0.0):
    """One iteration of Algorithm 1 on all models x [n, P]; `coin` 1: an averaging step."""
    n = len(x)
    if not coin:
        gradients = [
            problem.gradient(i, x[i]) + weight_decay * x[i] if problem.sizes[i] else 0 * x[i]
            for i in range(n)
        ]
        return x - alpha / (n * (1 - P)) * np.array(gradients)
    theta = alpha * PENALTY / (n * P)
    return (1 - theta) * x + theta * x.mean(0)


def paper(problem, x, runs, lr, lr_decay=1.0, weight_decay=0.0):
    """Algorithm 1 with α = n (1 - p) η, whose coins come in the given runs (K, A) of local and
    averaging steps; "w", the mean, and "x_i", all models, at the end of each averaging run.

    It begins with two averaging steps, which change nothing.
    """
    x, history = np.tile(x, (len(problem.sizes), 1)), []
    for t, (local, averaging) in enumerate(runs):
        alpha = len(x) * (1 - P) * lr * lr_decay**t
        for coin in [1] * 2 * (t == 0) + [0] * local + [1] * averaging:
            x = step(problem, x, coin, alpha, weight_decay)
        history.append({"w": x.mean(0), "x_i": x})
    return history


class Personalized(History):
    """`History`, and the personalized models as "x_i"."""

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        models = np.empty((pl_module.num_clients, pl_module.space.size))
        for clients in pl_module.iter_clients():
            models[clients.ids] = pl_module.personalized(clients)
        self.rounds[-1]["x_i"] = models


def assert_rounds(history, expected):
    reference.assert_rounds(history.rounds, expected, "w", "x_i", atol=1e-12)


@pytest.mark.parametrize("idle", [False, True])
def test_rounds_equal_the_paper_s_loop(fit, problem, idle):
    """Coin by coin, with weight decay and a decayed rate. A client without samples has f_i = 0: it
    counts in n and in the mean."""
    history = Personalized()
    algorithm = L2GD(problem.network(START), **COINS, **FULL)
    data = reference.with_an_idle_client(problem) if idle else problem
    fit(algorithm, data, ROUNDS, callbacks=[history])
    if idle:
        problem.sizes = np.append(problem.sizes, 0)
    runs = [algorithm.runs(t) for t in range(ROUNDS)]
    assert max(k for k, _ in runs) > 3 and max(a for _, a in runs) > 1
    assert_rounds(history, paper(problem, START, runs, **RATES))


def test_runs_are_runs_of_coins(fit, problem):
    """The coins of 4,000 rounds, one after another: each of the patterns of three coins that follow
    one coin comes as often as coins with P(1) = p say, up to 5 standard deviations. So nothing is
    left of the coin before, and the coins do not depend on anything but the seed and the round."""
    algorithm = fit(L2GD(problem.network(START), **COINS, **FULL), problem, 1)
    runs = [algorithm.runs(t) for t in range(4000)]
    assert runs == [algorithm.runs(t) for t in range(4000)]
    coins = np.concatenate([[0] * local + [1] * averaging for local, averaging in runs])
    # The first coin is a local step by definition, and the last ones end with an averaging run.
    windows = np.lib.stride_tricks.sliding_window_view(coins, 4)
    for before, *pattern in product((0, 1), repeat=4):
        after = windows[windows[:, 0] == before][:, 1:]
        share = P ** sum(pattern) * (1 - P) ** (3 - sum(pattern))
        found = (after == pattern).all(1).mean()
        # Windows overlap: at most three at a time depend on each other.
        assert abs(found - share) < 5 * np.sqrt(3 * share * (1 - share) / len(after))


# ---- the problem --------------------------------------------------------------------------------


def test_on_average_it_is_gradient_descent_on_the_penalized_problem(problem):
    """On quadratics an iteration is affine, so that the mean over all sequences of k coins, with
    their probabilities, is the k-th iterate of gradient descent with the step α on
    F = mean_i [f_i(x_i) + λ/2 |x_i - x̄|^2], of which the gradient in x_i is
    (f_i'(x_i) + λ (x_i - x̄)) / n. So λ has the same meaning for every n."""
    n, alpha, k = len(SIZES), 0.2, 6
    begin = START + np.random.default_rng(2).normal(size=(n, len(START)))
    mean = np.zeros_like(begin)
    for coins in product((0, 1), repeat=k):
        x = begin
        for coin in coins:
            x = step(problem, x, coin, alpha)
        mean += P ** sum(coins) * (1 - P) ** (k - sum(coins)) * x
    x = begin
    for _ in range(k):
        gradients = np.array([problem.gradient(i, x[i]) for i in ALL])
        x = x - alpha / n * (gradients + PENALTY * (x - x.mean(0)))
    np.testing.assert_allclose(mean, x, rtol=0, atol=1e-12)
    assert np.abs(x - begin).max() > 0.05


@pytest.mark.parametrize("penalty", [0.2, 0.6])
def test_it_ends_near_the_solution_of_the_penalized_problem(fit, penalty):
    """The solution x* is that of FedCLUP: f_i'(x_i) + λ (x_i - x̄) = 0.

    As for all SGD with an expected smoothness, the mean of |x - x*|^2 is at most e, where
    e <- (1 - α μ / n) e + 2 α^2 σ^2 in every iteration,
    n^2 σ^2 = sum_i [|f_i'(x_i*)|^2 / (1 - p) + λ^2 |x_i* - x̄*|^2 / p], and
    α <= n / 2 min((1 - p) / L, p / λ). The run keeps to the bound, and ends a hundred times nearer
    to the solution than the clients' own minima and the common model are."""
    q, rounds, n = forms.different(4), 100, 4
    rates = dict(lr=0.25, lr_decay=0.97)
    coins = dict(penalty=penalty, averaging_probability=P)
    algorithm = L2GD(q.problem.network(0.3), **coins, **rates, batch_size=None, loss=LOSS)
    fit(algorithm, q.problem, rounds)
    everyone = next(algorithm.iter_clients())
    x = np.empty_like(q.optima)
    x[everyone.ids] = algorithm.personalized(everyone)
    mean, solution = forms.held_together(q, penalty=penalty)
    slopes = q.curvatures * (solution - q.optima)
    pulls = penalty * (solution - mean)
    np.testing.assert_allclose(slopes + pulls, 0.0, rtol=0, atol=1e-12)
    sigma = np.sum(slopes**2 / (1 - P) + pulls**2 / P) / n**2
    assert rates["lr"] <= min(1 / q.curvatures.max(), P / (1 - P) / penalty) / 2
    bound = np.sum((0.3 - solution) ** 2)
    for t in range(rounds):
        alpha = n * (1 - P) * 0.25 * 0.97**t
        for _ in range(sum(algorithm.runs(t))):
            bound = (1 - alpha * q.curvatures.min() / n) * bound + 2 * alpha**2 * sigma
    error = np.sum((x - solution) ** 2)
    others = min(np.sum((model - solution) ** 2) for model in (q.optima, mean))
    assert error < bound < others and error < others / 100
    assert np.abs(algorithm.global_model.numpy() - mean).max() < 0.05
    assert algorithm.personalization_penalty == penalty


# ---- its ends, with given runs ------------------------------------------------------------------


class Given(L2GD):
    """Runs of three local steps and two averaging steps."""

    def runs(self, round_index):
        return 3, 2


@pytest.mark.parametrize("batch_size", [None, 2])
def test_where_averaging_is_complete_it_is_fedavg(fit, watch, problem, batch_size):
    """λ = p / (η (1 - p)) makes θ = 1: after the averaging steps all x_i are x̄."""
    settings = dict(lr=0.1, batch_size=batch_size, loss=LOSS)
    mixed = Personalized()
    algorithm = Given(problem.network(START), penalty=10 / 4, averaging_probability=0.2, **settings)
    fit(algorithm, problem, 4, callbacks=[mixed])
    plain = FedAvg(problem.network(START), weighting="uniform", local_steps=3, **settings)
    average = watch(plain, problem, 4)
    np.testing.assert_allclose(mixed["w"], average["w"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(mixed["x_i"][-1], np.tile(average["w"][-1], (4, 1)), atol=1e-12)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_without_penalty_every_client_is_alone(fit, problem, batch_size):
    settings = dict(lr=0.1, batch_size=batch_size, loss=LOSS)
    history = Personalized()
    algorithm = Given(problem.network(START), penalty=0.0, **settings)
    fit(algorithm, problem, 4, callbacks=[history])
    local = LocalTrain(problem.network(START), local_steps=3, **settings)
    fit(local, problem, 4)
    expected = local.client_rows("w", np.array(ALL))
    np.testing.assert_allclose(history["x_i"][-1], expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(history["w"][-1], expected.mean(0), rtol=0, atol=1e-13)


def test_the_local_baseline_takes_the_same_local_steps(fit):
    """It is `LocalTrain` with as many steps: the test losses are the same."""
    settings = dict(lr=0.1, batch_size=2, loss=LOSS)
    baseline = LocalBaseline()
    fit(Given(small_network(), **settings), small_world(), 3, callbacks=[baseline])
    local = LocalTrain(small_network(), local_steps=3, **settings)
    fit(local, small_world(), 3)
    expected = local.row["test/personalized/loss"]
    assert baseline.scores["loss"].mean() == pytest.approx(expected, rel=1e-12)


def test_a_run_of_averaging_steps_takes_one_communication(fit, problem):
    """P values of 8 bytes each way and round, however many steps a run has; a newcomer gets x̄."""
    algorithm = fit(L2GD(problem.network(START), **COINS, **FULL), problem, ROUNDS)
    assert sum(algorithm.runs(t)[1] for t in range(ROUNDS)) > ROUNDS
    numbers = algorithm.row["local_steps"], algorithm.row["averaging_steps"]
    assert numbers == algorithm.runs(ROUNDS - 1)
    assert algorithm.progress.bytes_up == algorithm.progress.bytes_down == ROUNDS * 4 * 8 * 8
    newcomers = algorithm.newcomer(next(algorithm.iter_clients()))
    assert torch.equal(newcomers, algorithm.global_model.expand(4, -1))
    assert algorithm.progress.samples == sum(SIZES) * sum(
        algorithm.runs(t)[0] for t in range(ROUNDS)
    )


# ---- arguments ----------------------------------------------------------------------------------


def test_client_sampling_is_refused(fit, problem):
    with refused("loop.clients_per_round: 2; L2GD needs all 4 clients"):
        fit(L2GD(problem.network(), **COINS), problem, 1, clients_per_round=2)


def test_the_cost_is_that_of_the_mean_number_of_steps(fit, problem):
    """All clients take the same number, 5 on average where p = 0.2, each on up to 4 samples."""
    algorithm = L2GD(problem.network(), batch_size=4, averaging_probability=0.2)
    np.testing.assert_allclose(algorithm.cost(np.array(SIZES)), [20, 10, 20, 15], rtol=1e-15)
    fit(algorithm, problem, 1)
    steps = np.mean([algorithm.runs(number)[0] for number in range(2000)])
    assert steps == pytest.approx(5, abs=4 * (20 / 2000) ** 0.5)  # the variance is (1 - p) / p^2
    full = L2GD(problem.network(), batch_size=None, averaging_probability=0.5)
    assert full.cost(np.array(SIZES)).tolist() == [2 * n for n in SIZES]
