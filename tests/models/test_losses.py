"""Losses with weights of classes, against their formulas."""

import math

import pytest
import torch
from torch import nn

from datamodules import SharedTest, SplitOwn, TensorDataModule
from models import LogisticRegression, WeightedBinaryCrossEntropy, WeightedCrossEntropy
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedAvg


def test_each_sample_has_the_weight_of_its_class():
    outputs = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [0.0, 0.0]])
    losses = WeightedCrossEntropy([2.0, 5.0])(outputs, torch.tensor([0, 1, -100]))
    # The probabilities are 1/4 and 3/4; the last sample counts nowhere.
    assert losses.tolist() == pytest.approx([2 * math.log(4), 5 * math.log(4 / 3), 0], rel=1e-6)


def test_each_output_has_a_weight_of_its_positive_label():
    outputs = torch.tensor([[0.0, math.log(3)]])  # s(z) is 1/2 and 3/4
    loss = WeightedBinaryCrossEntropy([2.0, 4.0])
    ones = loss(outputs, torch.ones(1, 2)).item()
    assert ones == pytest.approx((2 * math.log(2) + 4 * math.log(4 / 3)) / 2, rel=1e-6)
    zeros = loss(outputs, torch.zeros(1, 2)).item()
    assert zeros == pytest.approx((math.log(2) + math.log(4)) / 2, rel=1e-6)


def test_one_output_takes_targets_in_a_row():
    loss = WeightedBinaryCrossEntropy(3.0)
    losses = loss(torch.zeros(2, 1), torch.tensor([0.0, 1.0])).tolist()
    assert losses == pytest.approx([math.log(2), 3 * math.log(2)], rel=1e-6)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0]])
def test_weights_without_a_meaning_are_refused(weights):
    with pytest.raises(ValueError, match="at least 0, finite, and not all 0"):
        WeightedCrossEntropy(weights)


@pytest.mark.parametrize("engine", ["sequential", "vmap", "auto"])
def test_a_round_is_a_step_down_the_weighted_mean(engine, tmp_path):
    """One client with one full batch: w = -lr/n Σ w_y (p - e_y) x', from w = 0, where p = 1/2."""
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]])
    y = torch.tensor([0, 1, 1])
    network = LogisticRegression(2, 2)
    for parameter in network.parameters():
        nn.init.zeros_(parameter)
    loss = WeightedCrossEntropy([1.0, 5.0])
    method = FedAvg(network, lr=0.6, local_epochs=1, batch_size=None, loss=loss, engine=engine)
    data = TensorDataModule(x, y, num_clients=1, protocol=SplitOwn(0.0, 0.0))
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, enable_progress_bar=False)
    trainer.fit(method, datamodule=FederatedLoop(data))
    weights = torch.tensor([1.0, 5.0, 5.0])
    away = 0.5 - nn.functional.one_hot(y, 2).float()
    expected = -0.6 / 3 * (away * weights[:, None]).T @ x
    (matrix,) = [value for value in method.network.parameters() if value.ndim == 2]
    assert torch.allclose(matrix, expected, atol=1e-6)


def test_a_binary_network_is_scored_by_its_labels(tmp_path):
    """From w = 0, where every label is 0, one step makes them 1: two of three are right."""
    x = torch.ones(3, 1)
    data = TensorDataModule(x, torch.tensor([[0.0], [1], [1]]), x, torch.tensor([[1.0], [1], [0]]),
                            num_clients=1, protocol=SharedTest(validation=0.0))  # fmt: skip
    network = LogisticRegression(1, 1)
    for parameter in network.parameters():
        nn.init.zeros_(parameter)
    method = FedAvg(
        network, lr=1.0, local_epochs=1, batch_size=None, loss=WeightedBinaryCrossEntropy(5.0)
    )
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, enable_progress_bar=False)
    trainer.fit(method, datamodule=FederatedLoop(data))
    assert trainer.callback_metrics["test/global/accuracy"].item() == pytest.approx(2 / 3)
