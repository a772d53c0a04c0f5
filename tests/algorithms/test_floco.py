"""Floco against plain PyTorch, and its projection against slow searches."""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from pfl.algorithms import FedAvg, Floco
from pfl.algorithms.mixtures.floco import principal_components, spread_on_simplex
from pfl.method import generator
from tests.algorithms.class_world import (
    BODY,
    ENGINES,
    LABELS,
    LOCAL,
    TRACE,
    assert_same_end,
    mean_model,
    network,
    rate,
    samples,
    slope,
    start,
    world,
)

K, TAU, RHO = 3, 3, 0.4  # before τ clients 0, 2 and 3 have sent a change
ARGUMENTS = dict(endpoints=K, projection_round=TAU, radius=RHO)


def first_heads():
    """The network's own head, and its weights and biases in random orders."""
    heads = [start()[BODY:].numpy()]
    for k in range(1, K):
        draw, v = generator(0, "head", k), start().numpy()
        for begin, end in ((0, 12), (12, 15), (15, 24), (24, 27)):
            v[begin:end] = v[begin:end][draw.permutation(end - begin)]
        heads.append(v[BODY:])
    return torch.from_numpy(np.array(heads))


def points_of(t, i, centre):
    draw, steps = generator(0, "simplex", t, i), LOCAL["local_steps"]
    if centre is None:
        for row in draw.exponential(size=(steps, K)):
            yield row / row.sum()
        return
    for row in draw.uniform(-1, 1, size=(steps, K + 1)):
        yield centre + RHO * (row[-1] + 1) / 2 * row[:-1] / np.abs(row[:-1]).sum()


def components(values):
    """From the eigenvectors of the covariance."""
    away = values - values.mean(0)
    _, vectors = np.linalg.eigh(away.T @ away)
    vectors = vectors[:, ::-1][:, : min(K, len(values) - 1)]
    signs = [np.sign(v[np.abs(v).argmax()]) for v in vectors.T]
    found = away @ (vectors * signs)
    return np.pad(found, ((0, 0), (0, K - found.shape[1])))


def spread(points):
    """Projections by bisection of the thresholds, and the energy pair by pair."""

    def project(z):
        low, high = points.min(1, keepdims=True) - z, points.max(1, keepdims=True)
        for _ in range(60):
            middle = (low + high) / 2
            below = np.maximum(points - middle, 0).sum(1, keepdims=True) > z
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return np.maximum(points - low, 0) / z

    def energy(found):
        pairs = [(a, b) for k, a in enumerate(found) for b in found[:k]]
        return np.mean([1 / max(np.linalg.norm(a - b), 1e-4) ** 2 for a, b in pairs])

    return min(map(project, np.linspace(1e-4, 1, 1000)), key=energy)


@cache
def slow():
    """u with the middle head, all θ_k, and all p_i, in each round, with full batches."""
    u, heads, centres, changes, history = start()[:BODY], first_heads(), {}, {}, []
    for t, cohort in enumerate(TRACE):
        bodies, ends = [], []
        for i in cohort:
            (x, y), b, h = samples()[i], u.clone(), heads.clone()
            for alpha in points_of(t, i, centres.get(i)):
                alpha = torch.from_numpy(alpha)
                _, g = slope(torch.cat([b, alpha @ h]), x, y)
                decay = LOCAL["weight_decay"]
                b = b - rate(t) * (g[:BODY] + decay * b)
                h = h - rate(t) * (alpha[:, None] * g[BODY:] + decay * h)
            bodies.append(b)
            ends.append(h)
            changes[i] = (h - heads).flatten().numpy()
        u = mean_model(cohort, bodies, u)
        heads = mean_model(cohort, [h.flatten() for h in ends], heads.flatten()).view(K, -1)
        if cohort and t + 1 >= TAU and not centres:  # round 2 is empty, so that it is after round 3
            ids = sorted(changes)
            found = spread(components(np.array([changes[i] for i in ids])))
            centres = dict(zip(ids, found, strict=True))
        p = np.array([centres.get(i, np.zeros(K)) for i in range(len(LABELS))])
        history.append((torch.cat([u, heads.mean(0)]).numpy(), heads.numpy(), p))
    return history


def test_the_comparison_has_clients_with_a_centre_and_without():
    centres = slow()[-1][2]
    assert centres.any(1).tolist() == [True, False, True, True]
    np.testing.assert_allclose(centres[[0, 2, 3]].sum(1), 1, atol=1e-9)


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    method = Floco(network(), batch_size=None, engine=engine, **ARGUMENTS, **LOCAL)
    history = watch(method, world(), len(TRACE), trace=TRACE)
    expected = slow()
    for row, (w, heads, centres) in zip(history.rounds, expected, strict=True):
        np.testing.assert_allclose(row["w"], w, rtol=0, atol=1e-11)
        np.testing.assert_allclose(row["endpoints"], heads, rtol=0, atol=1e-11)
        np.testing.assert_allclose(row["centres"], centres, rtol=0, atol=1e-9)
    w, heads, centres = expected[-1]
    (clients,) = method.iter_clients("train")
    for i, model in zip(clients.ids, method.personalized(clients), strict=True):
        alpha = centres[i] if centres[i].any() else np.full(K, 1 / K)
        np.testing.assert_allclose(model[BODY:], alpha @ heads, rtol=0, atol=1e-9)
        np.testing.assert_allclose(model[:BODY], w[:BODY], rtol=0, atol=1e-11)


def test_centres_come_after_the_round_before_tau(watch):
    """τ = 2: after the second of four rounds; and never where one client alone sends."""
    for trace, expected in (([[0, 1]] * 4, [False, True, True, True]), ([[1]] * 4, [False] * 4)):
        history = watch(
            Floco(network(), **ARGUMENTS | {"projection_round": 2}, **LOCAL),
            world(),
            4,
            trace=trace,
        )
        assert [bool(row["centres"].any()) for row in history.rounds] == expected


def test_one_endpoint_is_fedavg(fit):
    """The simplex is a point, before τ and after it, as all components of changes are 0 or more."""
    settings = LOCAL | dict(batch_size=2, engine="sequential")
    methods = Floco(network(), endpoints=1, radius=0.0, **settings), FedAvg(network(), **settings)
    assert_same_end(fit, *methods, [[0, 1, 3]] * 2, atol=1e-14)


def test_a_part_may_have_endpoints_by_itself(fit):
    """Only the head's weights, as in the authors' code: 12 + 3 + 3 values are common."""
    method = fit(Floco(network(), simplex="out.weight", **ARGUMENTS), world(), 1, trace=[[]])
    sizes = {name: message.nbytes // 8 for name, message in method.download().items()}
    assert sizes == {"w": 18, "endpoints": 9 * K, "known": 0}


# ---- the projection ------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns", "count"), [*product((2, 5), (3, 7), (1, 3, 6))])
def test_principal_components(rows, columns, count):
    """They are the centred rows in an orthogonal basis of falling variance: inner products stay."""
    values = np.random.default_rng(rows).normal(size=(rows, columns))
    found = principal_components(values, count)
    assert found.shape == (rows, count)
    away = values - values.mean(0)
    covariance = found.T @ found
    np.testing.assert_allclose(covariance, np.diag(np.diag(covariance)), atol=1e-12)
    variances = np.linalg.eigvalsh(away @ away.T)[::-1][:count]
    np.testing.assert_allclose(np.diag(covariance)[: len(variances)], variances, atol=1e-12)
    assert (np.diag(covariance)[len(variances) :] == 0).all()


def test_a_component_has_the_sign_of_its_largest_entry():
    direction = np.array([0.5, -2.0, 0.1])
    values = np.array([1.0, -1.0, 3.0])[:, None] * direction
    found = principal_components(values, 1)[:, 0]  # along +2, that is against the direction
    expected = -np.array([0.0, -2.0, 2.0]) * np.linalg.norm(direction)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_points_are_spread_as_the_slow_search_finds(seed):
    points = 0.6 * np.random.default_rng(seed).normal(size=(4, K))
    found = spread_on_simplex(points)
    np.testing.assert_allclose(found, spread(points), rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-12)
    assert (found >= 0).all()


def test_a_point_of_the_simplex_with_sum_one_is_its_own_projection():
    """Where z = 1 spreads most: two corners, which no smaller z takes further apart."""
    corners = np.eye(3)[:2]
    np.testing.assert_allclose(spread_on_simplex(corners), corners, atol=1e-12)


def test_the_projection_is_the_nearest_point():
    """With z = 1 alone, against a solver: points so near to each other that z = 1e-4 is corners."""
    point = np.array([0.5, 0.2, -0.1])
    both = np.stack([point, point])  # equal points: every z has the same energy, the first counts
    z = 1e-4
    nearest = minimize(
        lambda a: z * ((a - point / z) ** 2).sum(),  # of a size that the solver's limits fit
        np.full(3, 1 / 3),
        bounds=[(0, 1)] * 3,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
    ).x
    np.testing.assert_allclose(spread_on_simplex(both)[0], nearest, atol=1e-6)
