"""IFCA against a slow NumPy loop, planted groups, FedAvg with one cluster; how models begin."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules import SharedTest
from models import HalfSquaredError
from pfl.algorithms import IFCA, FedAvg
from pfl.method.transport import chunks_of
from pfl.randomness import generator
from tests.algorithms.closed_forms_baselines import groups
from tests.algorithms.methods import METHODS
from tests.algorithms.reference_clup_pd import with_an_idle_client
from tests.algorithms.traced import ALL, BATCHES, FULL, LOSS, START, TRACE, furthest, in_cohorts
from tests.problems import Steps, least_squares, owned
from tests.refusal import refused

CLUSTERS = dict(clusters=3, perturbation=0.3)


def first_models(seed, clusters=3, perturbation=0.3):
    """The network's own values, and normal numbers on top of them."""
    noise = [generator(seed, "clusters", j).normal(size=len(START)) for j in range(1, clusters)]
    return np.stack([START, *(START + perturbation * n for n in noise)])


def loss(problem, i, w):
    """f_i(w) = mean over the samples of 1/2 |W x + b - y|^2, with 2 outputs and 3 features."""
    x, y = problem.features[i], problem.targets[i]
    return 0.5 * ((x @ w[:6].reshape(2, 3).T + w[6:] - y) ** 2).sum(1).mean()


def ifca(problem, models, batches, weighting):
    """The models after each round as "models" [k, P], and the choices as a dict "chosen".

    `batches[t][i]` has the samples of each local step.
    """
    history = []
    for cohort in batches:
        sent, chosen = [], {}
        for i, steps in cohort.items():
            j = chosen[i] = int(np.argmin([loss(problem, i, w) for w in models]))
            v, rate = models[j].copy(), 0.1 * 0.8 ** len(history)
            for samples in steps:
                v = v - rate * (problem.gradient(i, v, samples) + 0.1 * v)
            sent.append((j, problem.sizes[i] if weighting == "samples" else 1, v))
        models = models.copy()
        for j in range(len(models)):
            own = [(n, v) for k, n, v in sent if k == j]
            if own:
                models[j] = sum(n * v for n, v in own) / sum(n for n, _ in own)
        history.append({"models": models, "chosen": chosen})
    return history


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_rounds_equal_the_numpy_loop(watch, problem, tmp_path, weighting, engine):
    """Mini-batches, unequal clients, partial participation; and the table of choices."""
    steps = Steps()
    algorithm = IFCA(
        problem.network(START), **CLUSTERS, weighting=weighting, engine=engine, **BATCHES
    )
    history = watch(algorithm, problem, len(TRACE), callbacks=[steps], trace=TRACE, seed=3)
    batches = in_cohorts(steps.batches(problem))
    expected = ifca(problem, first_models(algorithm.seed), batches, weighting)
    assert furthest(history.rounds, expected, "models") < 1e-12
    chosen = [row["chosen"] for row in expected]
    assert len({j for row in chosen for j in row.values()}) > 1  # the choice matters
    # All models go down, and one comes up with the number of its cluster, in 8 bytes a value.
    visits = np.array([[i in cohort for i in ALL] for cohort in TRACE]).cumsum(0)
    assert np.array_equal(history["down"], 8 * 3 * len(START) * visits)
    assert np.array_equal(history["up"], 8 * (len(START) + 1) * visits)
    (table,) = Path(tmp_path).rglob("clusters.csv")
    rows = [tuple(map(int, row)) for row in list(csv.reader(table.read_text().splitlines()))[1:]]
    assert rows == [(t + 1, i, j) for t, row in enumerate(chosen) for i, j in row.items()]


# ---- identities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_one_cluster_is_fedavg(follow, weighting):
    settings = dict(weighting=weighting, **BATCHES)
    ours, plain = follow(IFCA, clusters=1, **settings), follow(FedAvg, **settings)
    np.testing.assert_allclose(ours["models"][:, 0], plain["w"], rtol=0, atol=1e-14)


def test_planted_groups_are_recovered(fit):
    """Those with even ids, and the others; a newcomer joins its group."""
    problem = groups(4).problem
    method = METHODS["IFCA"]
    algorithm = method.make(problem.network(0.3), lr=0.4, batch_size=None, loss=HalfSquaredError())
    fit(algorithm, problem, 6, unseen=[3])
    table = algorithm.recorded["clusters"]
    even, odd = table["cluster"][table["client"] % 2 == 0], table["cluster"][1]
    assert table["client"].tolist() == [0, 1, 2]
    assert even.tolist() == [1 - odd, 1 - odd]
    (newcomers,) = chunks_of(algorithm, algorithm.run.loop, np.array([3]), "test")
    algorithm.load_state(newcomers)
    mine = algorithm.models[odd]
    torch.testing.assert_close(algorithm.newcomer(newcomers)[0], mine, rtol=0, atol=0)


# ---- first models, who chooses by what, clients without samples, bytes, arguments ---------------


def test_first_models_have_the_values_of_each_parameter_in_another_order(fit, problem):
    """An empty round changes nothing."""
    algorithm = IFCA(problem.network(START), clusters=3, **FULL)
    fit(algorithm, problem, 1, trace=[[]])
    models = algorithm.models.numpy()
    np.testing.assert_array_equal(models[0], START)
    for model in models[1:]:
        np.testing.assert_array_equal(np.sort(model[:6]), START[:6])  # the weights
        np.testing.assert_array_equal(np.sort(model[6:]), START[6:])  # the biases
    assert len(np.unique(models, axis=0)) == 3


def test_the_training_samples_decide_in_every_split(fit):
    """The first model fits all training samples, and the second one the test samples."""
    first, second = first_models(seed=0, clusters=2)
    x = np.random.default_rng(2).normal(size=(20, 3))
    outputs = (x @ w[:6].reshape(2, 3).T + w[6:] for w in (first, second))
    x, y, other = map(torch.from_numpy, (x, *outputs))
    data = owned(np.arange(20) % 2, x, y, x, other, protocol=SharedTest(0.0))
    network = least_squares([1], bias=True).network(START)
    algorithm = IFCA(network, clusters=2, perturbation=0.3, loss=LOSS)
    fit(algorithm, data, 1, trace=[[]], seed=0)
    np.testing.assert_allclose(algorithm.models[1], second, atol=1e-14)
    for split in ("train", "test"):
        for clients in algorithm.iter_clients(split):
            np.testing.assert_array_equal(algorithm.personalized(clients), [first] * len(clients))
    assert algorithm.row["test/personalized/loss"] > 0.1


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_a_client_without_samples_is_in_no_cluster(watch, problem, weighting):
    data = with_an_idle_client(problem)
    algorithm = IFCA(problem.network(START), **CLUSTERS, weighting=weighting, local_steps=3, **FULL)
    history = watch(algorithm, data, 3, trace=[[*ALL, 4], [4], [1, 4]])
    batches = [{i: [None] * 3 for i in cohort} for cohort in (ALL, [], [1])]
    expected = ifca(problem, first_models(algorithm.seed), batches, weighting)
    assert furthest(history.rounds, expected, "models") < 1e-12


def test_a_network_without_other_orders_of_its_values_is_refused(problem):
    """All values of the network are 0, so that another order of them is the same model."""
    with refused("model.perturbation"):
        IFCA(problem.network(), perturbation=None)
