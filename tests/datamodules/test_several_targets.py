"""Integer targets with more than one label per sample, as in next-token prediction."""

import json
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from datamodules import ArrayDataModule, DatasetSamples, TensorDataModule, TensorSamples
from pfl.algorithms import FedAvg
from pfl.callbacks import wandb
from tests.problems import run


def test_only_one_integer_per_sample_is_a_label():
    x = torch.zeros(6, 2)
    for targets, expected in (
        (torch.arange(6), True),
        (torch.arange(6.0), False),
        (torch.arange(12).reshape(6, 2), False),
    ):
        assert TensorDataModule(x, targets, num_clients=2).has_labels is expected


def test_booleans_of_several_labels_are_0_and_1():
    labels = torch.tensor([[True, False], [False, False], [True, True]])
    for given in (labels, labels.numpy()):
        samples = TensorSamples(torch.zeros(3, 2), given)
        assert samples.targets.dtype == torch.float32
        assert samples.targets.tolist() == [[1, 0], [0, 0], [1, 1]]
    streamed = DatasetSamples(TensorDataset(torch.zeros(3, 2), labels), labels)
    for targets in (streamed.targets, streamed.gather(torch.arange(3))[1]):
        assert targets.dtype == torch.float32 and targets.tolist() == labels.float().tolist()
    assert TensorSamples(torch.zeros(3, 2), labels[:, 0]).targets.tolist() == [1, 0, 1]  # classes
    data = TensorDataModule(torch.zeros(3, 2), labels, num_clients=1)
    assert data.num_classes is None and not data.has_labels


class Next(nn.Module):
    """A network of scores for the next token, from tokens [B, T] to [B, classes, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Embedding(5, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scores(tokens).transpose(1, 2)


@pytest.fixture
def logger(monkeypatch):
    """A stand-in for the logger of W&B."""
    logger = MagicMock()
    monkeypatch.setattr(wandb, "_loggers", lambda trainer: [logger])
    return logger


def test_a_run_with_several_targets_writes_its_tables_without_labels(logger, tmp_path):
    tokens = torch.randint(5, (40, 7), generator=torch.Generator().manual_seed(0)).numpy()
    data = ArrayDataModule(tokens[:, :-1], tokens[:, 1:], num_clients=4)
    torch.manual_seed(0)
    arguments = dict(root=tmp_path, precision="32-true", callbacks=[wandb.WandbRecord()])
    run(FedAvg(Next(), lr=0.1), data, 2, **arguments)
    (path,) = tmp_path.glob("**/summary.json")
    assert json.loads(path.read_text())["round"] == 2
    (table,) = tmp_path.glob("**/clients.csv")
    names = table.read_text().splitlines()[0].split(",")
    assert "train_samples" in names and not [name for name in names if name.startswith("label_")]
    sent = [call.args[0] for call in logger.experiment.log.call_args_list]
    assert not [row for row in sent if "partition" in row] and "clients" in sent[-1]
