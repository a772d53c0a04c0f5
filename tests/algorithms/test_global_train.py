"""GlobalTrain is plain SGD on one pool of samples, wherever the samples came from."""

from functools import partial

import numpy as np
import pytest
import torch

from datamodules import (
    ClientInversion,
    ClientNoise,
    DatasetSamples,
    DigitsDataModule,
    FederatedDataModule,
    Loaded,
    LogNormal,
    Natural,
    Sampled,
    SplitOwn,
    TensorDataModule,
)
from models import HalfSquaredError
from pfl.algorithms import FedAvg, GlobalTrain, LocalTrain
from pfl.clients import ClientData, Clients, LocalSchedule
from tests.algorithms import reference_clup_pd as reference
from tests.algorithms.methods import (
    differing,
    everything,
    normalized_network,
    small_network,
    small_world,
)
from tests.algorithms.traced import BATCHES, FULL, RATES, SIZES, START
from tests.problems import History, Problem, Steps

COHORTS = [[1], [0, 2, 3], [3], [2, 1]]  # which should not matter


@pytest.fixture
def pool(problem):
    """The same samples, all owned by one client."""
    one = (np.concatenate(rows)[None] for rows in (problem.features, problem.targets))
    return Problem(*one, problem.make, bias=True)


# ---- a second implementation --------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [4, None])
def test_rounds_are_sgd_on_the_pooled_samples(watch, problem, pool, batch_size):
    """Two epochs of batches of 4, 4, 4, 4 and 1 of the 17 samples, or of all of them, in a new
    order each time; weight decay, and a rate that decays by rounds."""
    steps = Steps()
    settings = BATCHES | {"batch_size": batch_size}
    algorithm = GlobalTrain(problem.network(START), **settings)
    history = watch(algorithm, problem, 4, callbacks=[steps], trace=COHORTS)
    w, orders = START, []
    for t, (batches,) in enumerate(steps.batches(pool)):
        sizes = [4, 4, 4, 4, 1] if batch_size else [17]
        assert [len(batch) for batch in batches] == 2 * sizes
        for samples in batches:
            gradient = pool.gradient(0, w, samples) + RATES["weight_decay"] * w
            w = w - RATES["lr"] * RATES["lr_decay"] ** t * gradient
        np.testing.assert_allclose(history["w"][t], w, rtol=0, atol=1e-12)
        orders += [tuple(order) for order in np.split(np.concatenate(batches), 2)]
    assert all(sorted(order) == list(range(17)) for order in orders)
    assert len(set(orders)) == (len(orders) if batch_size else 1)
    assert algorithm.progress.samples == 4 * 2 * 17
    assert algorithm.participants == 1


# ---- identities ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        dict(local_epochs=2, batch_size=4),
        dict(local_steps=7, batch_size=5, weight_decay=0.1),
        dict(batch_size=None, optimizer=partial(torch.optim.SGD, momentum=0.9)),
    ],
    ids=["epochs", "steps", "optimizer"],
)
@pytest.mark.parametrize("make", [small_network, normalized_network])
def test_it_is_the_only_client_that_owns_everything(fit, make, settings):
    """Bit for bit, with running statistics: the model of `LocalTrain`'s only client, which owns the
    samples of all; the cohorts do not matter."""
    settings = dict(lr=0.2, lr_decay=0.9, loss=HalfSquaredError(), **settings)
    pooled = fit(GlobalTrain(make(), **settings), small_world(), 4, trace=COHORTS)
    alone = fit(LocalTrain(make(), **settings), small_world(clients=1), 4)
    only = np.array([0])
    assert torch.equal(pooled.global_model, alone.client_rows("w", only)[0])
    assert not torch.isclose(pooled.global_model, GlobalTrain(make()).global_model).any()
    if pooled.oracle.buffers.size:
        statistics = pooled.oracle.buffers.read(pooled.network, pooled.global_model)
        assert torch.equal(statistics, alone.client_rows("buffers", only)[0])
        assert pooled.network[2].num_batches_tracked >= 4
    # Nothing was sent, the statistics no more than the model.
    assert pooled.progress.bytes_up == pooled.progress.bytes_down == 0
    assert not pooled.progress.ledger.uplink.any() and not pooled.progress.ledger.downlink.any()


def test_one_full_step_is_fedavg_s(fit, problem):
    """The gradient of the pooled samples is the mean of the clients', weighted by samples."""
    settings = FULL | {"local_steps": 1}
    histories = History(), History()
    for kind, history in zip((GlobalTrain, FedAvg), histories, strict=True):
        fit(kind(problem.network(START), **settings), problem, 5, callbacks=[history])
    np.testing.assert_allclose(histories[0]["w"], histories[1]["w"], rtol=0, atol=1e-13)


# ---- what must not matter -----------------------------------------------------------------------


def test_cohorts_and_chunks_do_not_matter(fit, problem):
    """Bit for bit, unless a cohort is empty: then nothing happens."""
    settings = dict(trace=COHORTS), dict(clients_at_once=1), dict(clients_per_round=2)
    runs = []
    for loop in settings:
        algorithm = GlobalTrain(problem.network(START), **BATCHES)
        runs.append(everything(fit(algorithm, problem, 4, **loop)))
    assert all(differing(run, runs[0]) == set() for run in runs)
    algorithm = fit(GlobalTrain(problem.network(START), **BATCHES), problem, 1, trace=[[]])
    assert torch.equal(algorithm.global_model, torch.from_numpy(START))
    assert algorithm.progress.samples == algorithm.participants == 0


def test_a_client_without_samples_adds_none(fit, problem):
    histories = History(), History()
    for data, history in zip(
        (problem, reference.with_an_idle_client(problem)), histories, strict=True
    ):
        fit(GlobalTrain(problem.network(START), **BATCHES), data, 3, callbacks=[history])
    np.testing.assert_array_equal(histories[0]["w"], histories[1]["w"])


class Streamed(FederatedDataModule):
    """The samples of a problem, read one by one from a data set instead of held in memory."""

    def __init__(self, problem):
        super().__init__(
            partition=Natural(np.repeat(np.arange(4), SIZES)),
            protocol=SplitOwn(test=0.0, validation=0.0),
        )
        pairs = zip(problem.features, problem.targets, strict=True)
        rows = [(x, y) for xs, ys in pairs for x, y in zip(xs, ys, strict=True)]
        self.rows = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in rows]

    def load(self):
        targets = torch.stack([y for _, y in self.rows])
        return Loaded(DatasetSamples(self.rows, targets))


def test_streamed_samples_give_the_same_model(fit, problem):
    models = [
        fit(GlobalTrain(problem.network(START), **BATCHES), data, 2).global_model
        for data in (problem, Streamed(problem))
    ]
    torch.testing.assert_close(*models, rtol=0, atol=1e-12)


# ---- the pool -----------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", [None, Sampled(20)], ids=["stored", "drawn"])
def test_the_pool_owns_all_indices_and_copies_no_sample(partition):
    """Training samples only, one client after another; a sample that two clients have comes twice.
    Indices that the partition stores in this order are not copied either."""
    data = DigitsDataModule(num_clients=6, partition=partition, seed=3)
    data.setup()
    clients = ClientData(data)
    pool, train = clients.as_one_client(np.arange(6)), data.partition.train
    indices, starts = pool.owned("train", np.array([0]))
    assert starts.tolist() == [0]
    assert indices.tolist() == np.concatenate([train[i] for i in range(6)]).tolist()
    assert pool.sizes("train", np.array([0])).tolist() == [train.sizes.sum()]
    assert pool.samples is clients.samples
    if partition is None:
        stored, _ = clients.owned("train", np.arange(6))
        assert indices.data_ptr() == stored.data_ptr()
    # The clients themselves still own what they own.
    assert clients.sizes("train", np.arange(6)).tolist() == train.sizes.tolist()


def test_a_run_scores_the_global_model_on_every_client(fit):
    """All clients test on the same three samples, as does the only client of a `FedAvg` that owns
    all training samples: each has the same loss."""
    settings = dict(lr=0.2, batch_size=4, loss=HalfSquaredError())
    pooled = fit(GlobalTrain(small_network(), **settings), small_world(), 2, evaluate=("test",))
    single = FedAvg(small_network(), **settings)
    fit(single, small_world(clients=1), 2, evaluate=("test",))
    key = "test/global/loss"
    assert pooled.row[key] == pytest.approx(single.row[key], rel=1e-12)
    assert pooled.row[f"{key}_std"] == pytest.approx(0.0, abs=1e-12)
    assert "test/personalized/loss" not in pooled.row


@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 4], [4, 1]], ids=str)
def test_the_pool_shows_each_sample_as_its_own_client_sees_it(ids):
    """Transforms that differ between clients: the pool's samples are those of the clients."""
    images = np.random.default_rng(0).integers(0, 256, (60, 1, 4, 4), np.uint8)
    shifts = [ClientInversion(), ClientNoise()]
    rules = {"partition": LogNormal(0.5, min_size=3), "protocol": SplitOwn(0.0, 0.0)}
    data = TensorDataModule(images, np.arange(60), num_clients=5, transforms=shifts, **rules)
    clients = ClientData(data)

    def seen(own, client):
        batches = Clients(np.array([client]), 0, own).batches(LocalSchedule(7))
        pairs = ((b.inputs[0, : b.counts[0]], b.targets[0].tolist()) for b in batches)
        return {y: x for inputs, targets in pairs for x, y in zip(inputs, targets, strict=False)}

    pooled = seen(clients.as_one_client(np.array(ids)), 0)
    own = {y: x for client in ids for y, x in seen(clients, client).items()}
    assert pooled.keys() == own.keys()
    assert all(torch.equal(pooled[y], own[y]) for y in own)
