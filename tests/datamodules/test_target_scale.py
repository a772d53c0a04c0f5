"""Targets are scaled for training, and scored and predicted in their own unit."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError

from datamodules import ArrayDataModule, Natural, SharedTest, SplitOwn, TensorDataModule
from pfl.algorithms import FedAvg
from pfl.deploy.data import OwnSamples
from pfl.scores.forecast import MASE
from tests.problems import run
from tests.refusal import refused


class Line(nn.Module):
    """The input times one weight, which begins with 0."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x * self.weight


X = torch.tensor([1.0, -1.0, 2.0, -2.0]).double()[:, None]
Y = torch.tensor([170_000.0, 330_000.0, 330_000.0, 170_000.0]).double()  # mean 250000, std 80000
TEST = torch.tensor([3.0, -1.0]).double()[:, None], torch.tensor([260_000.0, 240_000.0]).double()


def houses(targets=Y, test=TEST[1], **options):
    """Two clients with two training samples each; both are tested on both test samples."""
    return TensorDataModule(
        X, targets, TEST[0], test, np.array([0, 0, 1, 1]), partition=Natural(),
        protocol=SharedTest(validation=0.0), **options,
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_one_step_on_prices_of_houses(engine, tmp_path):
    """The targets are -1, 1 and 1, -1 in units of 80,000 around 250,000.

    A step at rate 0.05 from 0 moves client c to 0.05 * 2 * mean(x z): -0.1 and 0.2; their mean is
    0.05. The test samples 3 and -1 get 250,000 + 80,000 * 0.15 = 262,000 and 246,000 for 260,000
    and 240,000: the errors are 2,000 and 6,000. A client's training targets differ by 160,000.
    The loss is that of 0.15 - 0.125 and -0.05 + 0.125.
    """
    metrics = {"mae": MeanAbsoluteError(), "rmse": MeanSquaredError(squared=False), "mase": MASE()}
    method = FedAvg(Line(), lr=0.05, local_steps=1, engine=engine)
    run(method, houses(scale_targets=True), 1, root=tmp_path, metrics=metrics)
    np.testing.assert_allclose(method.global_model.item(), 0.05, rtol=1e-12)
    found = method.evaluation.scores["test", "global"]
    np.testing.assert_allclose(found["mae"], [4000, 4000], rtol=1e-6)
    np.testing.assert_allclose(found["rmse"], math.sqrt((2000**2 + 6000**2) / 2), rtol=1e-6)
    np.testing.assert_allclose(found["mase"], 4000 / 160_000, rtol=1e-9)
    np.testing.assert_allclose(found["loss"], (0.025**2 + 0.075**2) / 2, rtol=1e-9)
    # The model is the one of targets that are standardized by hand.
    by_hand = FedAvg(Line(), lr=0.05, local_steps=1, engine=engine)
    data = houses((Y - 250_000) / 80_000, (TEST[1] - 250_000) / 80_000)
    run(by_hand, data, 1, root=tmp_path)
    assert torch.equal(by_hand.global_model, method.global_model)


def test_the_numbers_are_those_of_the_training_samples():
    targets = np.arange(20, dtype=np.float32) ** 2
    data = ArrayDataModule(
        np.ones((20, 1), np.float32), targets, client_ids=np.repeat([0, 1], 10),
        partition=Natural(), protocol=SplitOwn(test=0.2, validation=0.0), scale_targets=True,
    )  # fmt: skip
    data.setup()
    trained = targets[data.partition.train.flat]
    assert len(trained) == 16
    np.testing.assert_allclose(data.target_scale.mean, [trained.mean()], rtol=5.1e-4)
    np.testing.assert_allclose(data.target_scale.std, [trained.std()], rtol=5.1e-4)
    (line,) = data.conversions
    assert line.startswith("targets: standardized for training by mean ")
    assert data.samples.targets.max() == 19**2  # the samples keep their values


def test_each_of_several_targets_has_numbers_of_its_own():
    targets = np.stack([[0.0, 2.0, 0.0, 2.0], [500.0, 100.0, 300.0, 300.0]], 1)
    data = ArrayDataModule(
        np.ones((4, 1)), targets, num_clients=1, protocol=SplitOwn(0.0, 0.0), scale_targets=True
    )
    data.setup()
    assert data.target_scale.mean.tolist() == [1, 300]
    deviation = math.sqrt((200**2 + 200**2) / 4)
    np.testing.assert_allclose(data.target_scale.std, [1, deviation], rtol=5.1e-4)
    scaled = data.target_scale(torch.tensor([[2.0, 300.0]]))
    np.testing.assert_allclose(data.target_scale.own_unit(scaled), [[2, 300]], rtol=1e-6)


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_each_client_has_a_scale_of_its_own(engine, tmp_path):
    """A step from 0 moves client c to 0.05 * 2 * mean(x z), where z are its standardized targets.

    The numbers of a scale have four digits, so that all is equal to some 0.001.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=16)
    targets = x + rng.normal(size=16)
    targets[:8] = 200 + 100 * targets[:8]
    targets[8:] = 7_000 + 2_000 * targets[8:]
    given = torch.from_numpy(targets.copy())
    data = TensorDataModule(
        torch.from_numpy(x)[:, None], given, client_ids=np.repeat(["a", "b"], 8),
        partition=Natural(), protocol=SplitOwn(test=0.25, validation=0.0), scale_targets="client",
    )  # fmt: skip
    metrics = {"mae": MeanAbsoluteError(), "mase": MASE()}
    method = FedAvg(Line(), lr=0.05, local_steps=1, batch_size=None, engine=engine)
    run(method, data, 1, root=tmp_path, metrics=metrics)
    trained = [data.partition.train[client] for client in range(2)]
    means = [targets[own].mean() for own in trained]
    stds = [targets[own].std() for own in trained]
    moved = []
    for own, mean, std in zip(trained, means, stds, strict=True):
        moved.append(0.1 * np.mean(x[own] * (targets[own] - mean) / std))
    weight = np.mean(moved)
    np.testing.assert_allclose(method.global_model.item(), weight, rtol=2e-3)
    found = method.evaluation.scores["test", "global"]
    for client in range(2):
        tested = data.partition.test[client]
        errors = np.abs(means[client] + stds[client] * weight * x[tested] - targets[tested])
        np.testing.assert_allclose(found["mae"][client], errors.mean(), rtol=2e-3)
        own = targets[trained[client]]
        scale = np.abs(own[1:] - own[:-1]).mean()
        np.testing.assert_allclose(found["mase"][client], errors.mean() / scale, rtol=2e-3)
        np.testing.assert_allclose(data.training_targets(client), own, rtol=1e-6)
    (line,) = data.conversions
    assert line.startswith("targets: standardized by the mean and standard deviation of each")
    assert given.tolist() == targets.tolist()  # the user's tensor


def test_samples_of_several_clients_have_no_scale_of_one():
    with refused("data.scale_targets: 'client', but clients share samples", "must be true"):
        houses(scale_targets="client").setup()


def test_a_constant_target_is_divided_by_1():
    data = ArrayDataModule(
        np.ones((4, 1)), np.full(4, 7.0), num_clients=1, protocol=SplitOwn(0.0, 0.0),
        scale_targets=True,
    )  # fmt: skip
    data.setup()
    assert (data.target_scale.mean.item(), data.target_scale.std.item()) == (7, 1)


def test_classes_and_labels_have_no_scale(tmp_path):
    classes = ArrayDataModule(np.ones((4, 1)), np.arange(4), num_clients=1, scale_targets=True)
    with refused("data.scale_targets: True", "the targets are classes", "must be false"):
        classes.setup()
    labels = houses((Y > 200_000).double(), TEST[1] / 260_000, scale_targets=True)
    method = FedAvg(Line(), lr=0.05, loss=nn.BCEWithLogitsLoss())
    with refused("data.scale_targets: True", "BCEWithLogitsLoss compares labels of 0 and 1"):
        run(method, labels, 1, root=tmp_path)


def test_parties_have_no_common_numbers():
    party = OwnSamples(houses(scale_targets=True), 0, 2, 0)
    with refused("data.scale_targets: True", "must be false"):
        party.setup()


def test_a_class_that_the_loss_ignores_names_sample_and_client(tmp_path):
    """A sample with one class, which does not count, would teach nothing."""
    classes = torch.tensor([0, 1, 0, 2])
    data = TensorDataModule(
        X.expand(4, 3), classes, client_ids=np.array(["a", "a", "b", "b"]), partition=Natural(),
        protocol=SplitOwn(0.0, 0.0),
    )  # fmt: skip
    method = FedAvg(nn.Linear(3, 3), lr=0.1, loss=nn.CrossEntropyLoss(ignore_index=2))
    line = "1 samples have the class 2, which model.loss ignores (ignore_index), first sample 3"
    with refused(f"data: {line}", "client 1 (b)", "leave them out of the data"):
        run(method, data, 1, root=tmp_path)
