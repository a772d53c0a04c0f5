"""FedPAC against plain PyTorch, its quadratic program against all sets, and limits."""

from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch

from pfl.algorithms import FedPAC, FedRep
from pfl.algorithms.features.fedpac import mixing_weights, simplex_minimum
from tests.algorithms.class_world import (
    BODY,
    CLASSES,
    ENGINES,
    FEATURES,
    KNOWN,
    LABELS,
    LOCAL,
    SIZE,
    TRACE,
    as_sent,
    assert_rounds,
    class_means,
    descend,
    entropy,
    near_means,
    network,
    rate,
    samples,
    start,
    world,
    z_of,
)

HEAD = dict(head_epochs=2, head_lr=0.4)
PENALTY = 0.8

# ---- the quadratic program ----------------------------------------------------------------------


def by_all_sets(a):
    """min x'Ax over the simplex: the least of the minima over all faces, each a linear system, that
    have no negative value."""
    best = np.inf
    for size in range(1, len(a) + 1):
        for face in combinations(range(len(a)), size):
            system = np.ones((size + 1, size + 1))
            system[:size, :size], system[size, size] = a[np.ix_(face, face)], 0
            x = np.linalg.lstsq(system, np.eye(size + 1)[size], rcond=None)[0][:size]
            if x.min() >= 0 and abs(x.sum() - 1) < 1e-9:
                best = min(best, x @ a[np.ix_(face, face)] @ x)
    return best


@pytest.mark.parametrize("variance", [0.0, 0.01, 10.0])
@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_the_minimum_on_the_simplex_is_that_of_all_sets(n, rank, variance):
    """And x meets the conditions of a minimum: Ax is at least x'Ax everywhere."""
    rng = np.random.default_rng(n + 10 * rank)
    for _ in range(5):
        points = rng.normal(size=(n, rank)) + rng.normal(size=rank)
        a = points @ points.T + variance * np.diag(rng.random(n))
        x, scale = simplex_minimum(a), a.diagonal().max()
        assert x.min() >= 0 and abs(x.sum() - 1) < 1e-12
        assert (a @ x).min() >= x @ a @ x - 1e-12 * scale
        assert abs(x @ a @ x - by_all_sets(a)) < 1e-11 * scale


def test_equal_points_and_no_variance_end():
    """All weights are right where nothing differs; rows sum to one."""
    assert simplex_minimum(np.zeros((4, 4))).sum() == 1
    means = np.tile(np.random.default_rng(0).normal(size=(3, 4)), (3, 1))
    weights = mixing_weights(np.zeros(9), means)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=0, atol=1e-12)
    np.testing.assert_allclose(weights @ means, means, rtol=0, atol=1e-7)


def test_a_variance_that_rounding_makes_negative_counts_as_zero():
    """Equal means, so that only the variances decide: all weight is on the client without any. With
    the values as they are the system of both clients is singular."""
    assert mixing_weights(np.array([1.0, -1.0]), np.zeros((2, 3))).tolist() == [[0, 1], [0, 1]]


def test_weights_of_two_clients():
    """min a^2 V_1 + (1 - a)^2 (V_2 + d^2) for client 1, with d the distance of the H: its weight is
    a = (V_2 + d^2) / (V_1 + V_2 + d^2), here 3 + 4 = 7 of 8. For client 2 the own weight is
    (V_1 + d^2) / (V_1 + V_2 + d^2), 5 of 8."""
    weights = mixing_weights(np.array([1.0, 3.0]), np.array([[1.0, 2.0], [3.0, 2.0]]))
    expected = np.array([[7, 1], [3, 5]]) / 8
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12)


# ---- iterates -----------------------------------------------------------------------------------


def statistics(w, i):
    """V_i and H_i by the paper's sums over classes, with p = n_i,c / n_i."""
    x, y = samples()[i]
    z, variance, means = z_of(w, x), 0.0, torch.zeros(CLASSES, FEATURES).double()
    for label in set(LABELS[i]):
        own = z[y == label]
        p, mean = len(own) / len(y), own.mean(0)
        second = own.T @ own / len(own)
        variance += p * second.trace() - p**2 * (mean @ mean)
        means[label] = p * mean
    return float(variance) / len(y), means


def mixed(i, lent):
    """sum_j α_ij h_j: the minimum of the paper's sum over pairs, over all faces."""
    ids = sorted(lent)
    h = {j: lent[j][2] for j in ids}
    a = np.array(
        [[float(((h[i] - h[j]) * (h[i] - h[k])).sum()) for k in ids] for j in ids]
    ) + np.diag([lent[j][1] for j in ids])
    best, alpha = np.inf, None
    for size in range(1, len(ids) + 1):
        for face in combinations(range(len(ids)), size):
            inverse = np.linalg.pinv(a[np.ix_(face, face)]) @ np.ones(size)
            x = inverse / inverse.sum()
            if x.min() >= 0 and (value := x @ a[np.ix_(face, face)] @ x) < best:
                best, alpha = value, np.zeros(len(ids))
                alpha[list(face)] = x
    return sum(weight * lent[j][0] for weight, j in zip(alpha, ids, strict=True))


def slow():
    """w, whose head stays, the centroids and all h_i after each round."""
    body, known, sent, history = start()[:BODY], {}, {}, []
    heads = [start()[BODY:] for _ in LABELS]
    for t, cohort in enumerate(TRACE):
        new, models, counts = {}, {}, {}
        for i in cohort:
            x, y = samples()[i]
            lent = {j: sent[j] for j in cohort if j in sent}
            w = torch.cat([body, mixed(i, lent) if i in sent else heads[i]])
            new[i] = statistics(w, i)

            aligned = partial(near_means, x=x, y=y, known=known, penalty=PENALTY)
            # With full gradients an epoch is a step.
            head = HEAD["head_lr"], HEAD["head_epochs"], slice(BODY, None)
            w = descend(w, partial(entropy, x=x, y=y), *head)
            models[i] = descend(w, aligned, rate(t), LOCAL["local_steps"], slice(0, BODY))
            counts[i] = len(y)
        for i, w in models.items():
            heads[i] = w[BODY:]
            sent[i] = (heads[i], *new[i])
        if cohort:
            body = sum(counts[i] * models[i][:BODY] for i in cohort) / sum(counts.values())
        known |= class_means(cohort, models)
        w = torch.cat([body, start()[BODY:]])
        history.append((w, as_sent(known), torch.stack(heads).numpy()))
    return history


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    arguments = dict(penalty=PENALTY, batch_size=None, engine=engine)
    method = FedPAC(network(), **arguments, **HEAD, **LOCAL)
    assert_rounds(watch, method, slow(), "w", "centroids", "head")


# ---- limits, bytes, refusals --------------------------------------------------------------------


def test_one_client_without_penalty_is_fedrep(fit):
    """Bit for bit: a single client's head is mixed of itself. Without weight decay, which the one
    takes into the gradient of the body and the other into a factor on w."""
    settings = LOCAL | dict(batch_size=2, engine="sequential", weight_decay=0.0, lr=0.4, lr_decay=1)
    runs = [
        FedPAC(network(), penalty=0.0, head_epochs=2, head_lr=0.4, **settings),
        FedRep(network(), head_epochs=2, **settings),
    ]
    actual, expected = (fit(method, world(), 3, trace=[[0]] * 3) for method in runs)
    assert torch.equal(actual.global_model, expected.global_model)
    rows = (method.client_rows("head", np.arange(4)) for method in (actual, expected))
    assert torch.equal(*rows)


def test_the_ledger_books_what_is_sent(watch):
    """Numbers of 8 bytes. Down body and head, and 3 values and the class's number of each
    known centroid. Up body and head, V_i, H_i of three classes, and for each class of the
    client its number, n_i,c and 3 values."""
    history = watch(FedPAC(network(), batch_size=None), world(), 6, trace=TRACE)
    classes = np.array([len(set(labels)) for labels in LABELS])
    visits = np.array([[i in cohort for i in range(4)] for cohort in TRACE])
    up = SIZE + 1 + CLASSES * FEATURES + 5 * classes
    assert np.array_equal(history["up"], 8 * up * visits.cumsum(0))
    assert np.array_equal(
        history["down"], 8 * ((SIZE + 4 * np.array(KNOWN)) * visits.T).T.cumsum(0)
    )


def test_a_client_without_samples_lends_no_head(watch):
    """The others receive and train what they would without it, and it keeps the initial head."""
    runs = []
    for trace in ([[0, 1]] * 3, [[0, 1, 4]] * 3):
        history = watch(FedPAC(network(), **LOCAL), world(5), 3, trace=trace)
        runs.append(history)
    for alone, beside in zip(runs[0].rounds, runs[1].rounds, strict=True):
        for name in ("w", "head", "centroids"):
            np.testing.assert_allclose(beside[name], alone[name], rtol=0, atol=1e-15)
        assert np.array_equal(beside["head"][4], start()[BODY:])
