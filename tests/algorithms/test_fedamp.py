"""FedAMP and HeurFedAMP against a slow NumPy loop; weights, limits of the attention, refusals."""

import math

import numpy as np
import pytest
import torch

from pfl.algorithms import FedAMP, HeurFedAMP, LocalTrain
from pfl.algorithms.mixtures.fedamp import model_distances
from tests.algorithms.traced import ALL, LOSS, full, in_cohorts
from tests.problems import Steps
from tests.refusal import refused

TRACE = [ALL, [1, 3], [0], [], [0, 2, 3], ALL]
RATES = dict(lr=0.1, lr_decay=0.9, weight_decay=0.1)
# α_k halves after every second round; with σ = 30 the weights of others are from 0.01 to 0.1.
MESSAGES = dict(alpha=4.0, alpha_decay=0.5, decay_rounds=2, penalty=1.5)
METHODS = {
    "FedAMP": (FedAMP, dict(sigma=30.0)),
    "HeurFedAMP": (HeurFedAMP, dict(sigma=1.5)),
    "HeurFedAMP, own weight": (HeurFedAMP, dict(sigma=1.5, own_weight=0.7)),
}


@pytest.fixture
def start():
    """Models in all directions and of all lengths, so that the first weights are not all equal."""
    rng = np.random.default_rng(3)
    return rng.normal(size=(4, 8)) * rng.uniform(0.5, 2.0, size=(4, 1))


# ---- a second implementation --------------------------------------------------------------------


def attention(models, alpha, sigma, heuristic, own_weight):
    """The rows of ξ, entry by entry."""
    n = len(models)
    xi = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if i == j:
                continue
            if heuristic:
                cosine = (
                    models[i]
                    @ models[j]
                    / math.sqrt((models[i] @ models[i]) * (models[j] @ models[j]))
                )
                xi[i, j] = math.exp(sigma * cosine)
            else:
                square = ((models[i] - models[j]) ** 2).sum()
                xi[i, j] = alpha * math.exp(-square / sigma) / sigma
        if heuristic:
            own = 1 / n if own_weight is None else own_weight
            xi[i] *= (1 - own) / xi[i].sum() if n > 1 else 0
        xi[i, i] = 1 - xi[i].sum()
    return xi


def fedamp(
    problem,
    start,
    batches,
    *,
    heuristic=False,
    sigma,
    own_weight=None,
    alpha,
    alpha_decay,
    decay_rounds,
    penalty,
    lr,
    lr_decay=1.0,
    weight_decay=0.0,
):
    """Algorithm 1, client by client; all w_i after each round.

    `batches[t][i]` has the samples of each local step of client i in round t.
    """
    w, history = start.copy(), []
    for t, cohort in enumerate(batches):
        step, rate = alpha * alpha_decay ** (t // decay_rounds), lr * lr_decay**t
        xi = attention(w[list(cohort)], step, sigma, heuristic, own_weight)
        new = w.copy()
        for row, (i, steps) in zip(xi, cohort.items(), strict=True):
            u = sum(weight * w[j] for weight, j in zip(row, cohort, strict=True))
            v = u.copy()
            for samples in steps:
                g = problem.gradient(i, v, samples) + weight_decay * v
                v = v - rate * (g + penalty / step * (v - u))
            new[i] = v
        w = new
        history.append(w)
    return history


def settings_of(name):
    """The arguments of the second implementation."""
    kind, own = METHODS[name]
    return dict(heuristic=kind is HeurFedAMP, **own, **MESSAGES, **RATES)


@pytest.mark.parametrize("name", METHODS)
def test_rounds_equal_the_numpy_loop(watch, problem, start, name):
    """Partial participation, a client alone, a round without clients, decayed rate and α_k."""
    kind, own = METHODS[name]
    algorithm = kind(
        problem.network(0.5), **own, **MESSAGES, **RATES, local_steps=3, batch_size=None, loss=LOSS
    )
    history = watch(algorithm, problem, len(TRACE), trace=TRACE, start=start)
    expected = fedamp(problem, start, full(3, TRACE), **settings_of(name))
    np.testing.assert_allclose(history["w_i"], expected, rtol=0, atol=1e-11)
    np.testing.assert_array_equal(algorithm.global_model, 0.5)  # there is no global model


@pytest.mark.parametrize("name", METHODS)
def test_who_learned_from_whom_is_recorded(watch, problem, start, name):
    """In the fifth round, of clients 0, 2 and 3, from the models that the fourth left."""
    kind, own = METHODS[name]
    algorithm = kind(
        problem.network(0.5), **own, **MESSAGES, **RATES, local_steps=3, batch_size=None, loss=LOSS
    )
    watch(algorithm, problem, 5, start=start, trace=TRACE, clients_at_once=2)
    cohort, models = TRACE[4], fedamp(problem, start, full(3, TRACE[:4]), **settings_of(name))[-1]
    alpha = MESSAGES["alpha"] * MESSAGES["alpha_decay"] ** 2  # it has fallen after rounds 2 and 4
    heuristic = kind is HeurFedAMP
    xi = attention(models[cohort], alpha, own["sigma"], heuristic, own.get("own_weight"))
    table = algorithm.recorded["collaboration"]
    assert table["client"].tolist() == np.repeat(cohort, 3).tolist()
    assert table["partner"].tolist() == cohort * 3
    np.testing.assert_allclose(table["weight"], xi.flatten(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
@pytest.mark.parametrize("name", ["FedAMP", "HeurFedAMP"])
def test_mini_batches(watch, problem, start, name, engine):
    kind, own = METHODS[name]
    steps = Steps()
    arguments = dict(local_epochs=2, batch_size=2, loss=LOSS, engine=engine)
    algorithm = kind(problem.network(0.5), **arguments, **own, **MESSAGES, **RATES)
    loop = dict(start=start, callbacks=[steps], trace=TRACE)
    history = watch(algorithm, problem, len(TRACE), **loop)
    batches = in_cohorts(steps.batches(problem), TRACE)
    expected = fedamp(problem, start, batches, **settings_of(name))
    np.testing.assert_allclose(history["w_i"], expected, rtol=0, atol=1e-11)


# ---- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_rows_of_the_weights_sum_to_one(problem, name, n):
    kind, own = METHODS[name]
    models = np.random.default_rng(n).normal(size=(n, 8))
    xi = kind(problem.network(), **own).weights(torch.from_numpy(models), 3.0).numpy()
    own_weight = own.get("own_weight")
    expected = attention(models, 3.0, own["sigma"], kind is HeurFedAMP, own_weight)
    np.testing.assert_allclose(xi, expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(xi.sum(1), 1.0, rtol=0, atol=1e-13)
    assert (xi >= 0).all()


def test_weights_in_closed_form(problem):
    """On the line at 0, 1 and 3, with σ = 2 and α = 0.5: ξ_ij = exp(-d^2 / 2) / 4."""
    models = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    near, far, end = (math.exp(-square / 2) / 4 for square in (1, 9, 4))
    expected = [[1 - near - far, near, far], [near, 1 - near - end, end], [far, end, 1 - far - end]]
    xi = FedAMP(problem.network(), alpha=0.5, sigma=2.0).weights(models, 0.5)
    np.testing.assert_allclose(xi, expected, rtol=0, atol=1e-15)


def test_the_heuristic_at_right_angles_and_of_opposite_models(problem):
    """cos = 0 to one client and -1 to the other: e^0 and e^-σ share what ξ_ii leaves. A model of
    norm 0 has cosine 0."""
    method = HeurFedAMP(problem.network(), own_weight=0.4, sigma=2.0)
    models = torch.tensor([[1.0, 0.0], [0.0, 5.0], [-3.0, 0.0]], dtype=torch.float64)
    small = math.exp(-2)
    first = [0.4, 0.6 / (1 + small), 0.6 * small / (1 + small)]
    np.testing.assert_allclose(method.weights(models, 1.0)[0], first, rtol=0, atol=1e-15)
    np.testing.assert_allclose(method.weights(models, 1.0)[1], [0.3, 0.4, 0.3], rtol=0, atol=1e-15)
    models[0] = 0.0
    np.testing.assert_allclose(method.weights(models, 1.0)[0], [0.4, 0.3, 0.3], rtol=0, atol=1e-15)


def test_distances_of_similar_models_do_not_cancel():
    """Models that differ by 1e-5 of their length: their squared distance is 1e-10 of that of
    their norms."""
    rng = np.random.default_rng(0)
    common, moves = rng.normal(size=500), 1e-5 * rng.normal(size=(5, 500))
    expected = ((moves[:, None] - moves) ** 2).sum(2)
    actual = model_distances(torch.from_numpy(common + moves)).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=0)
    single = torch.from_numpy(common + moves).float()
    between = single.double().numpy()
    expected = ((between[:, None] - between) ** 2).sum(2)
    np.testing.assert_allclose(model_distances(single).numpy(), expected, rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize(
    ("round_index", "alpha"), [(0, 100.0), (29, 100.0), (30, 10.0), (59, 10.0), (60, 1.0)]
)
def test_the_schedule_of_alpha(problem, round_index, alpha):
    """Times 0.1 after every 30 rounds."""
    method = FedAMP(problem.network(), alpha=100.0)
    assert method.alpha_of(round_index) == pytest.approx(alpha, rel=1e-12)


# ---- ends, costs, newcomers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        # σ so small that different models do not see each other.
        lambda network, **kwargs: FedAMP(network, sigma=1e-9, alpha=1e-10, penalty=0.0, **kwargs),
        lambda network, **kwargs: HeurFedAMP(network, own_weight=1.0, penalty=0.0, **kwargs),
    ],
    ids=["FedAMP", "HeurFedAMP"],
)
def test_without_messages_every_client_trains_alone(watch, problem, start, method):
    """Also without a proximal term, λ = 0."""
    plain = dict(**RATES, local_steps=3, batch_size=None, loss=LOSS)
    ours, alone = (
        watch(kind(problem.network(), **plain), problem, 6, start=start, trace=TRACE)
        for kind in (method, LocalTrain)
    )
    np.testing.assert_allclose(ours["w_i"], alone["w_i"], rtol=0, atol=1e-13)


def test_a_client_that_never_took_part_has_the_initial_model(fit, problem):
    algorithm = FedAMP(problem.network(0.5), batch_size=None, loss=LOSS)
    fit(algorithm, problem, 2, trace=[[0, 2], [2, 3]])
    for clients in algorithm.iter_clients():
        for rule in (algorithm.personalized, algorithm.adaptation_start):
            models = rule(clients).numpy()
            assert (models[clients.ids == 1] == 0.5).all()
            assert (models[clients.ids != 1] != 0.5).all()


# ---- refusals -----------------------------------------------------------------------------------


def test_negative_weights_are_refused_before_any_training(fit, problem):
    """Three others weigh at most α / σ each: α = 2 needs σ = 6."""
    with refused("model.sigma: 5;", "at least 6"):
        fit(FedAMP(problem.network(), alpha=2.0, sigma=5.0, loss=LOSS), problem, 1)
    fit(FedAMP(problem.network(), alpha=2.0, sigma=6.0, loss=LOSS), problem, 1)
    fit(FedAMP(problem.network(), alpha=2.0, sigma=2.0, loss=LOSS), problem, 1, clients_per_round=2)


def test_a_client_alone_has_no_negative_weight(fit, problem):
    """Without others any α / σ will do, and α_k may fall after every round."""
    algorithm = FedAMP(problem.network(), alpha=2.0, sigma=1.0, decay_rounds=1, loss=LOSS)
    fit(algorithm, problem, 1, clients_per_round=1)


@pytest.mark.parametrize("kind", [FedAMP, HeurFedAMP])
@pytest.mark.parametrize("lr", [0.5, 0.3])
def test_rounds_whose_proximal_term_diverges_are_refused(fit, problem, kind, lr):
    """A step multiplies v - u by 1 - η λ / α_k. With λ = 1, α_k is 0.25 in rounds 5 and 6 and
    0.125 in round 7: η = 0.5 gives -1 and -3, and η = 0.3 gives -0.2 and -1.4."""
    settings = dict(alpha=1.0, alpha_decay=0.5, decay_rounds=2, sigma=100.0, lr=lr, loss=LOSS)
    fit(kind(problem.network(), **settings), problem, 6, trace=[[]] * 6)
    with refused("model.decay_rounds: 2;", "round 7 "):
        fit(kind(problem.network(), **settings), problem, 7, trace=[[]] * 7)
