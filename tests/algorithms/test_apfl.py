"""APFL against a slow NumPy loop, its mixture weights, and the methods at its two ends."""

import numpy as np
import pytest

from pfl.algorithms import APFL, FedAvg, LocalTrain
from tests.algorithms import reference_clup_pd as reference
from tests.algorithms.traced import (
    ALL,
    BATCH_COUNTS,
    BATCHES,
    FULL,
    LOSS,
    RATES,
    SIZES,
    START,
    TRACE,
    full,
    furthest,
    in_cohorts,
)
from tests.problems import History, Models, Steps, scalar_problem

ADAPTIVE = pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])


# ---- a second implementation --------------------------------------------------------------------


def apfl(problem, w, batches, alpha, adaptive, lr, lr_decay=1.0, weight_decay=0.0, slip=None):
    """Algorithm 1, client by client and step by step; w, all v_i and all α_i after each round.

    `batches[t][i]` has the samples of each local step that client i takes in round t. Slips:
    "old w", v̄_i has w_i before its step; "at v", the gradient of v_i at v_i; "whole gradient", the
    step of v_i without α_i; "swapped", (1 - α) v + α w; "restarted", v_i starts at w; "sampled",
    the mean weighted by samples; "new v", α_i's derivative after the step of v_i; "every step",
    α_i moves in every local step; "fresh", α_i starts anew in every round.
    """
    v = np.tile(w, (problem.num_clients, 1))
    alphas, history = np.full(problem.num_clients, alpha), []

    def gradient(i, model, samples):
        return problem.gradient(i, model, samples) + weight_decay * model

    for t, cohort in enumerate(batches):
        rate, sent = lr * lr_decay**t, {}
        for i, steps in cohort.items():
            shared, own = w, w if slip == "restarted" else v[i]
            a = alpha if slip == "fresh" else alphas[i]
            for k, samples in enumerate(steps):
                before = shared
                shared = shared - rate * gradient(i, shared, samples)
                other = before if slip == "old w" else shared
                share = 1 - a if slip == "swapped" else a
                mixed = share * own + (1 - share) * other
                g = gradient(i, own if slip == "at v" else mixed, samples)
                new = own - rate * (1.0 if slip == "whole gradient" else a) * g
                if adaptive and (k == 0 or slip == "every step"):
                    slope = ((new if slip == "new v" else own) - other) @ g
                    a = min(1.0, max(0.0, a - rate * slope))
                own = new
            sent[i], v[i], alphas[i] = shared, own, a
        weights = [problem.sizes[i] if slip == "sampled" else 1 for i in cohort]
        w = np.average(list(sent.values()), axis=0, weights=weights)
        history.append({"w": w, "v": v.copy(), "alpha": alphas[:, None].copy()})
    return history


def names_of(adaptive):
    return ("w", "v", "alpha") if adaptive else ("w", "v")


@ADAPTIVE
def test_rounds_equal_the_numpy_loop(fit, problem, adaptive):
    """Partial participation, unequal clients, weight decay, a decayed rate."""
    history = History()
    algorithm = APFL(problem.network(START), alpha=0.7, adaptive=adaptive, local_steps=4, **FULL)
    fit(algorithm, problem, len(TRACE), callbacks=[history], trace=TRACE)
    expected = apfl(problem, START, full(4), 0.7, adaptive, **RATES)
    reference.assert_rounds(history.rounds, expected, *names_of(adaptive), atol=1e-12)


@ADAPTIVE
@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_mini_batches_and_unequal_numbers_of_local_steps(fit, problem, adaptive, engine):
    """Both gradients of a local step are of the same mini-batch."""
    history, steps = History(), Steps()
    settings = BATCHES | {"adaptive": adaptive, "engine": engine}
    algorithm = APFL(problem.network(START), alpha=0.3, **settings)
    fit(algorithm, problem, len(TRACE), callbacks=[history, steps], trace=TRACE)
    seen = reference.batches_of(problem, steps)
    for own in (own for clients in seen for own in clients):
        assert all(map(np.array_equal, own[::2], own[1::2]))
    batches = in_cohorts([[own[::2] for own in clients] for clients in seen])
    assert [len(batches[0][i]) for i in ALL] == BATCH_COUNTS
    expected = apfl(problem, START, batches, 0.3, adaptive, **RATES)
    reference.assert_rounds(history.rounds, expected, *names_of(adaptive), atol=1e-12)


SLIPS = ["old w", "at v", "whole gradient", "swapped", "restarted", "sampled"]
SLIPS_OF_ALPHA = ["new v", "every step", "fresh"]


@pytest.mark.parametrize("slip", SLIPS + SLIPS_OF_ALPHA)
def test_a_wrong_formula_would_show(problem, slip):
    """The cases above are sharp: each misreading moves some model or α_i by more than 0.01."""
    adaptive = slip in SLIPS_OF_ALPHA
    right, wrong = (
        apfl(problem, START, full(4), 0.7, adaptive, slip=s, **RATES) for s in (None, slip)
    )
    assert max(furthest(right, wrong, name) for name in names_of(adaptive)) > 0.01


# ---- the mixture weights ------------------------------------------------------------------------


def objective(problem, i, w):
    """f_i(w), with weight decay: the mean of |W x + b - y|^2 / 2 over the samples."""
    x, y = problem.features[i], problem.targets[i]
    outputs = x @ w[:6].reshape(2, 3).T + w[6:]
    return ((outputs - y) ** 2).sum(1).mean() / 2 + RATES["weight_decay"] / 2 * (w @ w)


def test_alpha_follows_the_slope_of_the_objective_along_the_mixture(fit, problem):
    """d/dα f_i(α v_i + (1 - α) w_i) by a central difference, which is exact for quadratics."""
    history = History()
    algorithm = APFL(problem.network(START), alpha=0.6, adaptive=True, local_steps=1, **FULL)
    fit(algorithm, problem, 4, callbacks=[history])
    w, v, alpha = START, np.tile(START, (4, 1)), np.full(4, 0.6)
    for t, row in enumerate(history.rounds):
        rate = RATES["lr"] * RATES["lr_decay"] ** t
        slopes = []
        for i in ALL:
            own = w - rate * (problem.gradient(i, w) + RATES["weight_decay"] * w)
            ahead, behind = (
                objective(problem, i, a * v[i] + (1 - a) * own)
                for a in (alpha[i] + 0.5, alpha[i] - 0.5)
            )
            slopes.append(ahead - behind)
        expected = np.clip(alpha - rate * np.array(slopes), 0.0, 1.0)
        np.testing.assert_allclose(row["alpha"][:, 0], expected, rtol=0, atol=1e-12)
        assert np.abs(slopes).max() > 0.01
        w, v, alpha = row["w"], row["v"], row["alpha"][:, 0]
    assert ((alpha > 0) & (alpha < 1)).any()


def test_alpha_stays_between_0_and_1(fit):
    """f_i(w) = 1/2 (w - A_i)^2 with A = 0 and 20, from w = 0 with α = 1/2, η = 1/2, one local step.

    Round 1. Client 0 is at its optimum: nothing moves. Client 1: w_1 = 10, v̄_1 = 5, so that the
    slope is (0 - 10)(5 - 20) = 150 and α_1 = 0.5 - 75, clipped to 0. The server has w = 5.
    Round 2. Client 0: w_0 = 2.5, v̄_0 = 1.25, so that the slope is (0 - 2.5) 1.25 = -3.125 and
    α_0 = 0.5 + 1.5625, clipped to 1; v_0 = 0 - 0.5 * 0.5 * 1.25. Client 1 with α_1 = 0 stays.
    """
    problem, history = scalar_problem([0.0, 20.0]), History()
    algorithm = APFL(
        problem.network(0.0), alpha=0.5, adaptive=True, lr=0.5, batch_size=None, loss=LOSS
    )
    fit(algorithm, problem, 2, callbacks=[history])
    assert history["alpha"][..., 0].tolist() == [[0.5, 0.0], [1.0, 0.0]]
    np.testing.assert_allclose(history["v"][1][0], -0.3125, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(history["v"][1][1], history["v"][0][1])


# ---- the two ends -------------------------------------------------------------------------------


def everyone(algorithm, rule):
    """The models of all clients, [M, P], in the order of their ids."""
    models = {}
    for clients in algorithm.iter_clients():
        models |= dict(zip(clients.ids.tolist(), rule(clients).numpy(), strict=True))
    return np.stack([models[i] for i in sorted(models)])


@pytest.mark.parametrize(("alpha", "adaptive"), [(0.0, False), (0.5, True), (1.0, False)])
def test_the_global_model_is_that_of_fedavg(fit, problem, alpha, adaptive):
    """Whatever clients keep does not matter for what they send; equal weights in the mean."""
    history, plain = History(), History()
    mixed = APFL(problem.network(START), alpha=alpha, adaptive=adaptive, **BATCHES)
    for algorithm, seen in (
        (mixed, history),
        (FedAvg(problem.network(START), weighting="uniform", **BATCHES), plain),
    ):
        fit(algorithm, problem, len(TRACE), callbacks=[seen], trace=TRACE)
    np.testing.assert_allclose(history["w"], plain["w"], rtol=0, atol=1e-13)
    for way in ("down", "up"):
        np.testing.assert_array_equal(history[way], plain[way])


def test_without_a_share_of_its_own_a_client_has_the_global_model(fit, problem):
    """α = 0: v_i never moves, and each client is scored with w."""
    algorithm = APFL(problem.network(START), alpha=0.0, **BATCHES)
    fit(algorithm, problem, len(TRACE), trace=TRACE)
    np.testing.assert_array_equal(
        everyone(algorithm, lambda clients: clients.state["v"]), np.tile(START, (4, 1))
    )
    w = algorithm.global_model.numpy()
    np.testing.assert_array_equal(everyone(algorithm, algorithm.personalized), np.tile(w, (4, 1)))
    assert np.abs(w - START).max() > 0.1


def test_with_a_share_of_one_every_client_is_alone(fit, problem):
    """α = 1: v̄_i = v_i, and both methods take the same mini-batches."""
    algorithm, alone = APFL(problem.network(START), alpha=1.0, **BATCHES), Models()
    fit(algorithm, problem, len(TRACE), trace=TRACE)
    local = LocalTrain(problem.network(START), **BATCHES)
    fit(local, problem, len(TRACE), callbacks=[alone], trace=TRACE)
    models = everyone(algorithm, algorithm.personalized)
    np.testing.assert_allclose(models, alone["w_i"][-1], rtol=0, atol=1e-13)


# ---- evaluation, counts, arguments --------------------------------------------------------------


@ADAPTIVE
def test_a_client_is_scored_with_its_mixture_and_the_newest_w(fit, problem, adaptive):
    """α_i v_i + (1 - α_i) w, with w of the last round. Client 4 has no samples and client 1 never
    takes part: both have the initial v_i and α_i. A newcomer has w."""
    algorithm, history = APFL(problem.network(START), adaptive=adaptive, **FULL), History()
    data = reference.with_an_idle_client(problem)
    fit(algorithm, data, 3, callbacks=[history], trace=[[0, 2, 4], [3, 4], [0]])
    last = history.rounds[-1]
    alpha = last["alpha"] if adaptive else np.full((5, 1), 0.5)
    for i in (1, 4):
        np.testing.assert_array_equal(last["v"][i], START)
        assert alpha[i] == 0.5
    expected = alpha * last["v"] + (1 - alpha) * last["w"]
    models = everyone(algorithm, algorithm.personalized)
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-14)
    newcomers = everyone(algorithm, algorithm.newcomer)
    np.testing.assert_array_equal(newcomers, np.tile(last["w"], (5, 1)))


def test_both_gradients_are_counted(fit, problem):
    """Two epochs of w_i and two of v_i over all samples; `cost` says the same."""
    algorithm = APFL(problem.network(START), **BATCHES)
    fit(algorithm, problem, 1)
    assert algorithm.samples_seen == 2 * 2 * sum(SIZES)
    assert algorithm.cost(np.array(SIZES)).tolist() == [4 * n for n in SIZES]
