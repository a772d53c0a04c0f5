"""kNN-Per, models with a local memory, against NumPy; what it refuses."""

from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from datamodules import Given, SharedTest, SplitOwn, TensorDataModule
from datamodules.partitions.index_arrays import Ragged
from datamodules.partitions.partition import Partition
from models import HalfSquaredError
from pfl import FederatedLoop
from pfl.algorithms import FedAvg, LocalTrain
from pfl.scores.neighbours import Neighbours
from tests.algorithms.class_world import BODY, CLASSES, FEATURES, INPUTS, network, z_of
from tests.algorithms.methods import small_network, small_world
from tests.problems import owned, quiet
from tests.refusal import refused

# Client 1 has no validation samples, client 2 no training samples; the orders by size differ.
SIZES = {"train": [5, 9, 0, 7], "val": [6, 0, 3, 9], "test": [3, 6, 5, 4]}
K, SCALE = 3, 0.02


def world(root):
    rng = np.random.default_rng(4)
    total = sum(map(sum, SIZES.values()))
    inputs, labels = rng.normal(size=(total, INPUTS)), rng.integers(0, CLASSES, total)
    places = iter(np.split(rng.permutation(total), np.cumsum([*chain(*SIZES.values())])))
    arrays = {n: [next(places) for _ in sizes] for n, sizes in SIZES.items()}
    ragged = {
        n: Ragged.from_sizes(np.concatenate(a), np.array(SIZES[n])) for n, a in arrays.items()
    }
    Partition(**ragged, targets=labels).save(root / "partition.npz")
    data = TensorDataModule(
        torch.from_numpy(inputs),
        torch.from_numpy(labels),
        num_clients=4,
        partition=Given(str(root / "partition.npz")),
    )
    return data, inputs, labels, arrays


def mixed(w, inputs, labels, own, split):
    """p and q of a client's samples, sample by sample."""
    z = z_of(w, torch.from_numpy(inputs)).numpy()
    a, c = w[BODY:-CLASSES].view(CLASSES, FEATURES).numpy(), w[-CLASSES:].numpy()
    for sample in own[split]:
        p = np.exp(a @ z[sample] + c)
        p, votes = p / p.sum(), np.zeros(CLASSES)
        away = [(((z[j] - z[sample]) ** 2).sum(), labels[j]) for j in own["train"]]
        for distance, label in sorted(away)[:K]:
            votes[label] += np.exp(-distance / (FEATURES * SCALE))
        yield p, votes / votes.sum() if away else p, labels[sample]


def accuracy_and_loss(w, inputs, labels, own):
    rows, grid = list(mixed(w, inputs, labels, own, "val")), np.arange(11) / 10
    right = [sum((m * q + (1 - m) * p).argmax() == y for p, q, y in rows) for m in grid]
    m = grid[right.index(max(right))]
    rows = [(m * q + (1 - m) * p, y) for p, q, y in mixed(w, inputs, labels, own, "test")]
    losses = [min(-np.log(h[y]) if h[y] else np.inf, 100) for h, y in rows]
    return m, np.mean([h.argmax() == y for h, y in rows]), np.mean(losses)


@pytest.mark.parametrize("kind", [FedAvg, LocalTrain])
def test_scores_are_those_of_numpy(tmp_path, kind):
    """From the global model, and from the personalized ones; in groups of two clients."""
    data, inputs, labels, arrays = world(tmp_path)
    method = kind(network(), lr=0.5, batch_size=None)
    metric = {"recall": MulticlassAccuracy(num_classes=CLASSES, average="micro")}
    loop = FederatedLoop(data, neighbours=Neighbours(K, SCALE), metrics=metric, clients_at_once=2)
    quiet(tmp_path, 2, precision="64-true").fit(method, datamodule=loop)
    models = method.global_model.expand(4, -1)
    models = models if kind is FedAvg else method.client_rows("w", np.arange(4))
    own = [{split: parts[i] for split, parts in arrays.items()} for i in range(4)]
    expected = [
        accuracy_and_loss(w, inputs, labels, one) for w, one in zip(models, own, strict=True)
    ]
    weights, accuracy, loss = zip(*expected, strict=True)
    assert weights[1] == weights[2] == 0 < max(weights)  # or nothing was mixed
    scores = method.evaluation.scores["test", "knn"]
    np.testing.assert_allclose(scores["accuracy"], accuracy, rtol=1e-12)
    np.testing.assert_allclose(scores["loss"], loss, rtol=1e-10)
    np.testing.assert_allclose(scores["recall"], accuracy, rtol=1e-6)
    assert method.row["test/knn/accuracy"] == pytest.approx(np.mean(accuracy))
    assert not any("finetuned" in name for name in method.row)


def test_ten_neighbours_vote_unless_another_number_is_given():
    """Of eleven samples at 1, 2, ..., 11, one to a class, the farthest has no vote."""
    away = torch.arange(1.0, 12)[:, None]
    votes = Neighbours(scale=7.0).probabilities(torch.zeros(1, 1), away, torch.arange(11), 11)
    weights = np.exp(-(np.arange(1, 11) ** 2) / 7.0)
    np.testing.assert_allclose(votes[0, :10], weights / weights.sum(), rtol=1e-5)
    assert votes[0, 10] == 0


def test_small_distances_far_from_zero_keep_their_digits():
    """Of 40 features 4096, 4096 + 1/64 and so on, each sample's nearest one is itself; the square
    of 4096 has the rounding 1 in float32."""
    z = 4096 + torch.arange(40.0)[:, None] / 64
    votes = Neighbours(k=1).probabilities(z, z, torch.arange(40), 40)
    assert votes.equal(torch.eye(40))


def test_nothing_of_the_memory_remains(tmp_path):
    """Models and all other numbers are the same as in a run without neighbours."""
    rows = []
    for name, neighbours in (("with", Neighbours(K)), ("without", None)):
        data, method = world(tmp_path)[0], FedAvg(network(), lr=0.5, batch_size=2)
        loop = FederatedLoop(data, neighbours=neighbours, clients_per_round=2)
        quiet(tmp_path / name, 2, precision="64-true").fit(method, datamodule=loop)
        rows.append(method.row)
    more = rows[0].keys() - rows[1].keys()
    assert more and all("/knn/" in name for name in more)
    assert {name: rows[0][name] for name in rows[1]} == rows[1]


def _setup(data, method, root, **neighbours):
    loop = FederatedLoop(data, neighbours=Neighbours(**neighbours))
    quiet(root, 1, precision="64-true").fit(method, datamodule=loop)


def test_what_has_no_neighbours_is_refused(tmp_path):
    with refused("loop.neighbours: the targets are values"):
        _setup(small_world(), FedAvg(small_network(), loss=HalfSquaredError()), tmp_path)
    x, y = torch.rand(12, 4).double(), torch.arange(12) % 2
    owners = np.arange(12) // 3
    data = owned(owners, x, y, protocol=SplitOwn(0.3, 0.3))
    with refused("loop.neighbours: Linear is a single layer, before which"):
        _setup(data, FedAvg(nn.Linear(4, 2).double()), tmp_path)
    data = owned(owners, x, y, x, y, protocol=SharedTest(0.0))
    with refused("loop.neighbours: the mixture is chosen on validation samples"):
        _setup(data, FedAvg(network()), tmp_path)
    with refused("loop.neighbours.k: 0"):
        Neighbours(k=0)
    with refused("loop.neighbours.scale: 0"):
        Neighbours(scale=0.0)
