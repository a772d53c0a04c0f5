"""APFL against a slow NumPy loop, its mixture weights, and the methods at its two ends."""

import numpy as np
import pytest

from pfl.algorithms import APFL, FedAvg, LocalTrain
from tests.algorithms import reference_clup_pd as reference
from tests.algorithms.traced import ALL, BATCHES, FULL, LOSS, RATES, START, TRACE, full, in_cohorts
from tests.problems import Steps, scalar_problem

ADAPTIVE = pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])


# ---- a second implementation --------------------------------------------------------------------


def apfl(problem, w, batches, alpha, adaptive, lr, lr_decay=1.0, weight_decay=0.0):
    """Algorithm 1, client by client and step by step; w, all v_i and all α_i after each round.

    `batches[t][i]` has the samples of each local step that client i takes in round t.
    """
    v = np.tile(w, (problem.num_clients, 1))
    alphas, history = np.full(problem.num_clients, alpha), []

    def gradient(i, model, samples):
        return problem.gradient(i, model, samples) + weight_decay * model

    for t, cohort in enumerate(batches):
        rate, sent = lr * lr_decay**t, {}
        for i, steps in cohort.items():
            shared, own, a = w, v[i], alphas[i]
            for k, samples in enumerate(steps):
                shared = shared - rate * gradient(i, shared, samples)
                g = gradient(i, a * own + (1 - a) * shared, samples)
                new = own - rate * a * g
                if adaptive and k == 0:
                    a = min(1.0, max(0.0, a - rate * (own - shared) @ g))
                own = new
            sent[i], v[i], alphas[i] = shared, own, a
        w = np.mean(list(sent.values()), axis=0)
        history.append({"w": w, "v": v.copy(), "alpha": alphas[:, None].copy()})
    return history


def names_of(adaptive):
    return ("w", "v", "alpha") if adaptive else ("w", "v")


@ADAPTIVE
def test_rounds_equal_the_numpy_loop(follow, problem, adaptive):
    """Partial participation, unequal clients, weight decay, a decayed rate."""
    history = follow(APFL, alpha=0.7, adaptive=adaptive, local_steps=4, **FULL)
    expected = apfl(problem, START, full(4), 0.7, adaptive, **RATES)
    reference.assert_rounds(history.rounds, expected, *names_of(adaptive), atol=1e-12)


@ADAPTIVE
@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_mini_batches_and_unequal_numbers_of_local_steps(follow, problem, adaptive, engine):
    """Both gradients of a local step are of the same mini-batch."""
    steps = Steps()
    settings = BATCHES | {"adaptive": adaptive, "engine": engine}
    history = follow(APFL, callbacks=[steps], alpha=0.3, **settings)
    seen = steps.batches(problem)
    for own in (own for clients in seen for own in clients):
        assert all(map(np.array_equal, own[::2], own[1::2]))
    batches = in_cohorts([[own[::2] for own in clients] for clients in seen])
    expected = apfl(problem, START, batches, 0.3, adaptive, **RATES)
    reference.assert_rounds(history.rounds, expected, *names_of(adaptive), atol=1e-12)


# ---- the mixture weights ------------------------------------------------------------------------


def objective(problem, i, w):
    """f_i(w), with weight decay: the mean of |W x + b - y|^2 / 2 over the samples."""
    x, y = problem.features[i], problem.targets[i]
    outputs = x @ w[:6].reshape(2, 3).T + w[6:]
    return ((outputs - y) ** 2).sum(1).mean() / 2 + RATES["weight_decay"] / 2 * (w @ w)


def test_alpha_follows_the_slope_of_the_objective_along_the_mixture(watch, problem):
    """d/dα f_i(α v_i + (1 - α) w_i) by a central difference, which is exact for quadratics."""
    algorithm = APFL(problem.network(START), alpha=0.6, adaptive=True, local_steps=1, **FULL)
    history = watch(algorithm, problem, 4)
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


def test_alpha_stays_between_0_and_1(watch):
    """f_i(w) = 1/2 (w - A_i)^2 with A = 0 and 20, from w = 0 with α = 1/2, η = 1/2, one local step.

    Round 1. Client 0 is at its optimum: nothing moves. Client 1: w_1 = 10, v̄_1 = 5, so that the
    slope is (0 - 10)(5 - 20) = 150 and α_1 = 0.5 - 75, clipped to 0. The server has w = 5.
    Round 2. Client 0: w_0 = 2.5, v̄_0 = 1.25, so that the slope is (0 - 2.5) 1.25 = -3.125 and
    α_0 = 0.5 + 1.5625, clipped to 1; v_0 = 0 - 0.5 * 0.5 * 1.25. Client 1 with α_1 = 0 stays.
    """
    problem = scalar_problem([0.0, 20.0])
    algorithm = APFL(
        problem.network(0.0), alpha=0.5, adaptive=True, lr=0.5, batch_size=None, loss=LOSS
    )
    history = watch(algorithm, problem, 2)
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
def test_the_global_model_is_that_of_fedavg(follow, alpha, adaptive):
    """Whatever clients keep does not matter for what they send; equal weights in the mean."""
    history = follow(APFL, alpha=alpha, adaptive=adaptive, **BATCHES)
    plain = follow(FedAvg, weighting="uniform", **BATCHES)
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


def test_with_a_share_of_one_every_client_is_alone(fit, watch, problem):
    """α = 1: v̄_i = v_i, and both methods take the same mini-batches."""
    algorithm = APFL(problem.network(START), alpha=1.0, **BATCHES)
    fit(algorithm, problem, len(TRACE), trace=TRACE)
    alone = watch(LocalTrain(problem.network(START), **BATCHES), problem, len(TRACE), trace=TRACE)
    models = everyone(algorithm, algorithm.personalized)
    np.testing.assert_allclose(models, alone["w_i"][-1], rtol=0, atol=1e-13)


# ---- evaluation, counts, arguments --------------------------------------------------------------


@ADAPTIVE
def test_a_client_is_scored_with_its_mixture_and_the_newest_w(watch, problem, adaptive):
    """α_i v_i + (1 - α_i) w, with w of the last round. Client 4 has no samples and client 1 never
    takes part: both have the initial v_i and α_i. A newcomer has w."""
    algorithm = APFL(problem.network(START), adaptive=adaptive, **FULL)
    data = reference.with_an_idle_client(problem)
    history = watch(algorithm, data, 3, trace=[[0, 2, 4], [3, 4], [0]])
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
