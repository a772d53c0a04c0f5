"""pFedMe against a slow NumPy loop, its Moreau envelopes in closed form, and FedAvg."""

import numpy as np
import pytest

from pfl.algorithms import FedAvg, pFedMe
from tests.algorithms import reference_clup_pd as reference
from tests.algorithms.traced import ALL, BATCHES, FULL, LOSS, RATES, START, full, in_cohorts
from tests.problems import Steps, least_squares

# η λ = 0.5, so that each local step goes half of the way from w_i to θ_i.
MOREAU = {"penalty": 5.0, "personal_steps": 3, "personal_lr": 0.08, "server_mixture": 0.7}


# ---- a second implementation --------------------------------------------------------------------


def pfedme(
    problem,
    w,
    batches,
    *,
    penalty,
    personal_steps,
    personal_lr,
    server_mixture,
    lr,
    lr_decay=1.0,
    weight_decay=0.0,
):
    """Algorithm 1, client by client and step by step; w and all θ_i after each round.

    `batches[t][i]` has the samples of each local step that client i takes in round t.
    """
    theta, history = np.tile(w, (problem.num_clients, 1)), []
    for t, cohort in enumerate(batches):
        models = []
        for i, steps in cohort.items():
            own = w
            for samples in steps:
                theta[i] = own
                for _ in range(personal_steps):
                    g = problem.gradient(i, theta[i], samples) + weight_decay * theta[i]
                    theta[i] -= personal_lr * (g + penalty * (theta[i] - own))
                own = own - lr * lr_decay**t * penalty * (own - theta[i])
            models.append(own)
        w = (1 - server_mixture) * w + server_mixture * np.mean(models, axis=0)
        history.append({"w": w, "theta": theta.copy()})
    return history


def test_rounds_equal_the_numpy_loop(follow, problem):
    """Partial participation, unequal clients, weight decay, a decayed η and a β that is not 1."""
    history = follow(pFedMe, local_steps=4, **MOREAU, **FULL)
    expected = pfedme(problem, START, full(4), **MOREAU, **RATES)
    reference.assert_rounds(history.rounds, expected, "w", "theta", atol=1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_mini_batches_and_unequal_numbers_of_local_steps(follow, problem, engine):
    """All inner steps of a local step are on the same mini-batch."""
    steps = Steps()
    history = follow(pFedMe, callbacks=[steps], engine=engine, **MOREAU, **BATCHES)
    seen = steps.batches(problem)
    for own in (own for clients in seen for own in clients):
        assert all(map(np.array_equal, own[::3], own[1::3]))
        assert all(map(np.array_equal, own[::3], own[2::3]))
    batches = in_cohorts([[own[::3] for own in clients] for clients in seen])
    expected = pfedme(problem, START, batches, **MOREAU, **RATES)
    reference.assert_rounds(history.rounds, expected, "w", "theta", atol=1e-12)


# ---- the envelopes ------------------------------------------------------------------------------

PLAIN = dict(local_steps=1, batch_size=None, loss=LOSS)


def proximal_point(problem, i, w, penalty):
    """argmin_θ f_i(θ) + λ/2 |θ - w|^2 for grad f_i(θ) = H_i θ - b_i: (H_i + λ) θ = b_i + λ w."""
    held = reference.hessian(problem, i) + penalty * np.eye(len(w))
    return np.linalg.solve(held, reference.slope(problem, i) + penalty * w)


def envelope(problem, i, w, penalty):
    """F_i(w), up to a constant of the client: f_i(θ) = θ' H_i θ / 2 - b_i' θ."""
    theta = proximal_point(problem, i, w, penalty)
    value = theta @ reference.hessian(problem, i) @ theta / 2
    return value - reference.slope(problem, i) @ theta + penalty / 2 * ((theta - w) ** 2).sum()


def test_many_inner_steps_find_the_proximal_point(watch, problem):
    """And then w_i moves along the gradient of the envelope, here by central differences, which are
    exact: the envelope of a quadratic is a quadratic. 300 steps of 0.1 on curvatures from λ = 2
    leave 0.8^300 of the distance."""
    penalty = 2.0
    arguments = dict(penalty=penalty, personal_steps=300, personal_lr=0.1, lr=0.3)
    algorithm = pFedMe(problem.network(START), **arguments, **PLAIN)
    history = watch(algorithm, problem, 2, trace=[ALL, [2]])
    points = [proximal_point(problem, i, START, penalty) for i in ALL]
    np.testing.assert_allclose(history["theta"][0], points, rtol=0, atol=1e-12)
    gradients = [
        [
            envelope(problem, i, START + unit / 2, penalty)
            - envelope(problem, i, START - unit / 2, penalty)
            for unit in np.eye(problem.size)
        ]
        for i in ALL
    ]
    expected = START - 0.3 * np.mean(gradients, axis=0)
    np.testing.assert_allclose(history["w"][0], expected, rtol=0, atol=1e-11)
    # Only client 2 takes part in round 2: its θ is that of the new w, and the others keep theirs.
    points[2] = proximal_point(problem, 2, history["w"][0], penalty)
    np.testing.assert_allclose(history["theta"][1], points, rtol=0, atol=1e-12)


@pytest.mark.parametrize("server_mixture", [0.5, 1.0, 1.5])
def test_the_fixed_point_is_the_minimum_of_the_mean_envelope(watch, server_mixture):
    """grad F_i(w) = λ (w - θ_i) = M_i (H_i w - b_i) with M_i = λ (H_i + λ)^-1, since
    (H_i + λ) θ_i = b_i + λ w. It is 0 in the mean at w*, and a round leaves
    (I - β η mean M_i H_i) (w - w*). At w* the θ_i are the w_i of the minimum over w and all w_i
    together, which another linear solve gives."""
    problem, penalty, rounds = least_squares((30, 12, 20), seed=6), 1.5, 3
    h = [reference.hessian(problem, i) for i in range(3)]
    m = [penalty * np.linalg.inv(own + penalty * np.eye(6)) for own in h]
    curvature = np.mean([a @ own for a, own in zip(m, h, strict=True)], axis=0)
    pull = np.mean([a @ reference.slope(problem, i) for i, a in enumerate(m)], axis=0)
    optimum = np.linalg.solve(curvature, pull)
    together, personal = reference.coupled_minimizer(problem, penalty)
    np.testing.assert_allclose(optimum, together, rtol=0, atol=1e-12)
    assert np.abs(optimum - reference.minimizer(problem)).max() > 0.01

    left = np.eye(6) - server_mixture * 0.6 * curvature
    assert np.abs(np.linalg.eigvalsh(left)).max() < 1  # so that w* is where all rounds lead
    for start in (optimum, np.full(6, 0.5)):
        arguments = dict(penalty=penalty, personal_steps=60, personal_lr=0.3, lr=0.6)
        algorithm = pFedMe(
            problem.network(start), server_mixture=server_mixture, **arguments, **PLAIN
        )
        history = watch(algorithm, problem, rounds)
        for t, w in enumerate(history["w"]):
            expected = optimum + np.linalg.matrix_power(left, t + 1) @ (start - optimum)
            np.testing.assert_allclose(w, expected, rtol=0, atol=1e-11)
        if start is optimum:
            np.testing.assert_allclose(history["theta"][-1], personal, rtol=0, atol=1e-11)


def test_a_weak_penalty_leaves_the_clients_alone(watch):
    """λ -> 0 with η λ = 1: θ_i is the client's own optimum up to λ, and w the mean of these."""
    problem, penalty = least_squares((30, 12, 20), seed=6), 1e-7
    arguments = dict(penalty=penalty, personal_steps=400, personal_lr=0.5, lr=1 / penalty)
    algorithm = pFedMe(problem.network(0.5), **arguments, **PLAIN)
    history = watch(algorithm, problem, 1)
    own = [
        np.linalg.solve(reference.hessian(problem, i), reference.slope(problem, i))
        for i in range(3)
    ]
    np.testing.assert_allclose(history["theta"][0], own, rtol=0, atol=1e-5)
    np.testing.assert_allclose(history["w"][0], np.mean(own, axis=0), rtol=0, atol=1e-5)


def test_a_strong_penalty_gives_one_model_to_all(watch):
    """λ -> ∞: θ_i = w up to 1/λ, and grad F_i(w) = grad f_i(w) up to 1/λ. A round is a step of
    gradient descent on the mean of the f_i, with the rate β η. An inner step leaves 1 - η_p λ, here
    1/2, of the distance to the proximal point."""
    problem, penalty, start = least_squares((30, 12, 20), seed=6), 1e6, np.full(6, 0.5)
    arguments = dict(penalty=penalty, personal_steps=50, personal_lr=0.5 / penalty, lr=1 / penalty)
    algorithm = pFedMe(problem.network(start), server_mixture=0.5 * penalty, **arguments, **PLAIN)
    history = watch(algorithm, problem, 3)
    w = start
    for row in history.rounds:
        np.testing.assert_allclose(row["theta"], np.tile(w, (3, 1)), rtol=0, atol=1e-5)
        w = w - 0.5 * np.mean([problem.gradient(i, w) for i in range(3)], axis=0)
        np.testing.assert_allclose(row["w"], w, rtol=0, atol=1e-5)
    assert np.abs(w - start).max() > 0.1


# ---- identities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [0.01, 8.0])
def test_with_one_inner_step_it_is_fedavg(follow, penalty):
    """θ_i = w_i - η_p g_i(w_i), where the penalty is 0: w_i moves by η λ η_p g_i(w_i)."""
    inner, rates = 0.1 / (0.05 * penalty), RATES | {"lr": 0.05}
    settings = BATCHES | rates | {"penalty": penalty, "personal_steps": 1, "personal_lr": inner}
    history = follow(pFedMe, **settings)
    plain = follow(FedAvg, weighting="uniform", **BATCHES)
    np.testing.assert_allclose(history["w"], plain["w"], rtol=0, atol=1e-12)
    for way in ("down", "up"):
        np.testing.assert_array_equal(history[way], plain[way])


# ---- evaluation, counts, arguments --------------------------------------------------------------


def test_the_last_theta_is_evaluated(watch, problem):
    """Client 4 has no samples and client 1 never takes part: both have the initial model. A
    newcomer has w."""
    algorithm = pFedMe(problem.network(START), **MOREAU, **FULL)
    data = reference.with_an_idle_client(problem)
    history = watch(algorithm, data, 2, trace=[[0, 2, 4], [0, 3, 4]])
    theta, w = history.rounds[-1]["theta"], history.rounds[-1]["w"]
    assert set(np.flatnonzero((theta == START).all(1))) == {1, 4}
    for clients in algorithm.iter_clients():
        np.testing.assert_array_equal(algorithm.personalized(clients), theta[clients.ids])
        np.testing.assert_array_equal(algorithm.newcomer(clients), np.tile(w, (len(clients), 1)))
    assert not np.isclose(w, START).any()
