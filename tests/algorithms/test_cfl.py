"""CFL against a slow NumPy loop that tries all splits, its ends, newcomers, bytes, refusals."""

import csv
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from models import HalfSquaredError
from pfl.algorithms import CFL, FedAvg
from pfl.algorithms.clusters.cfl import second_half
from pfl.method.transport import chunks_of
from tests.algorithms.closed_forms_baselines import groups
from tests.algorithms.traced import FULL, SIZES, START, furthest, unlike
from tests.problems import History
from tests.refusal import refused

ROUNDS = 12
MEAN, LARGEST = 0.15, 0.7  # between the norms that occur here
STEPS, RATE, DECAY = 4, 0.3, 0.95
ALL = list(range(len(SIZES)))

TRAINING = FULL | dict(lr=RATE, lr_decay=DECAY, local_steps=STEPS)


def cosine(a, b):
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def best_split(updates):
    """The members of the second group, by trying all groups that do not have the first member."""
    found = {}
    for bits in product((False, True), repeat=len(updates) - 1):
        second = np.array((False, *bits))
        if second.any():
            across = [cosine(a, b) for a in updates[~second] for b in updates[second]]
            found[max(across)] = second
    return found[min(found)]


def cfl(problem, weighting, most):
    """The models after each round, and each client's cluster."""
    models, cluster, history = [START.copy()], np.zeros(len(SIZES), dtype=int), []
    weights = np.array(problem.sizes if weighting == "samples" else [1.0] * len(SIZES))
    for t in range(ROUNDS):
        updates = []
        for i in ALL:
            v = models[cluster[i]].copy()
            for _ in range(STEPS):
                v = v - RATE * DECAY**t * (problem.gradient(i, v) + 0.1 * v)
            updates.append(v - models[cluster[i]])
        updates = np.array(updates)
        for c in range(len(models)):
            mine = np.flatnonzero(cluster == c)
            mean = np.average(updates[mine], axis=0, weights=weights[mine])
            quiet = np.linalg.norm(mean) < MEAN
            far = max(np.linalg.norm(updates[i]) for i in mine) > LARGEST
            if quiet and far and len(mine) > 1 and len(models) < most:
                cluster[mine[best_split(updates[mine])]] = len(models)
                models.append(models[c].copy())
        for c in range(len(models)):
            mine = cluster == c
            models[c] = models[c] + np.average(updates[mine], axis=0, weights=weights[mine])
        padded = [*models, *[START] * (most - len(models))]
        history.append({"models": np.array(padded), "cluster": cluster.copy()})
    return history


def made(problem, **settings):
    arguments = dict(mean_norm=MEAN, largest_norm=LARGEST, most_clusters=4, local_steps=STEPS)
    return CFL(
        problem.network(START), **FULL | dict(lr=RATE, lr_decay=DECAY) | arguments | settings
    )


@pytest.mark.parametrize(
    ("weighting", "most"), [("uniform", 4), ("samples", 4), ("samples", 3), ("uniform", 1)]
)
@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_rounds_equal_the_numpy_loop(watch, problem, tmp_path, weighting, most, engine):
    """The models, the clusters at the server, and the table of the clusters that clients had."""
    method = made(problem, weighting=weighting, most_clusters=most, engine=engine)
    history = watch(method, problem, ROUNDS)
    expected = cfl(problem, weighting, most)
    assert furthest(history.rounds, expected, "models") < 1e-12
    assert furthest(history.rounds, expected, "cluster") == 0
    assert expected[-1]["cluster"].max() == min(most, 4 if weighting == "samples" else 3) - 1
    (table,) = Path(tmp_path).rglob("clusters.csv")
    rows = [tuple(map(int, row)) for row in list(csv.reader(table.read_text().splitlines()))[1:]]
    before = [np.zeros(4, dtype=int), *(row["cluster"] for row in expected[:-1])]
    assert rows == [(t + 1, i, c[i]) for t, c in enumerate(before) for i in ALL]


@pytest.mark.parametrize("seed", range(8))
def test_the_split_has_the_least_similarity_across(seed):
    """Against all splits of six vectors."""
    updates = np.random.default_rng(seed).normal(size=(6, 3))
    similarity = np.array([[cosine(a, b) for b in updates] for a in updates])
    np.testing.assert_array_equal(second_half(similarity), best_split(updates))


def test_complete_linkage_would_split_otherwise():
    """Four points of a chain, 0, 10, 21 and 33 degrees: its widest gap is at its end."""
    angles = np.radians([0.0, 10.0, 21.0, 33.0])
    similarity = np.cos(angles[:, None] - angles)
    assert second_half(similarity).tolist() == [False, False, False, True]


# ---- identities, groups, newcomers --------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_one_cluster_is_fedavg(fit, problem, weighting):
    ours, plain = History(), History()
    method = made(problem, weighting=weighting, most_clusters=1)
    average = FedAvg(problem.network(START), weighting=weighting, **TRAINING)
    fit(method, problem, 4, callbacks=[ours])
    fit(average, problem, 4, callbacks=[plain])
    np.testing.assert_allclose(ours["models"][:, 0], plain["w"], rtol=0, atol=1e-13)


def test_planted_groups_are_found_and_a_newcomer_has_the_root(fit):
    """Clients 1 and 3, and client 2; client 0 never trains, and gets the model before the split."""
    problem, history = groups(4).problem, History()
    start = problem.network(0.3)
    settings = dict(lr=0.4, local_steps=6, batch_size=None, loss=HalfSquaredError())
    method = fit(CFL(start, **settings), problem, 8, unseen=[0], callbacks=[history])
    assert method.cluster.tolist() == [0, 1, 0]
    split = next(t for t, row in enumerate(history.rounds) if row["cluster"].max() > 0)
    root = history.rounds[split - 1]["models"][0]
    (newcomers,) = chunks_of(method, method.run.loop, np.array([0]), "test")
    method.load_state(newcomers)
    np.testing.assert_array_equal(method.newcomer(newcomers)[0], root)
    assert method.has_personalized and not method.has_global  # which stays the root


def test_a_client_without_samples_has_no_weight():
    """Its change is 0, and the others' mean is as if it were not there."""
    method = CFL(unlike().network(START))
    model, updates = method.models[0].clone(), torch.ones(3, 8, dtype=torch.float64)
    updates[2] = 0
    method._move(model, updates, torch.tensor([1.0, 1.0, 0.0]).double(), np.arange(3))
    np.testing.assert_array_equal(model, START + 1)
    method._move(model, updates, torch.tensor([1.0, 1.0, 0.0]).double(), np.array([2]))
    np.testing.assert_array_equal(model, START + 1)


def test_rounds_of_some_clients_are_refused(fit, problem):
    with refused("loop.clients_per_round", "CFL"):
        fit(made(problem), problem, 1, clients_per_round=2)
