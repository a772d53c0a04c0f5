"""What the frozen part of a network gives is stored: it runs once, and the results are the same."""

import copy

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, Natural, Normalize, SplitOwn, TensorDataModule
from models import LogisticRegression, LoRA
from pfl.algorithms import FedAvg, FedSALoRA, GlobalTrain
from pfl.method import frozen_part
from tests.problems import quiet

SEEN = [0]  # how many samples the first block has seen


class Counted(nn.Linear):
    def forward(self, x):
        SEEN[0] += len(x)
        return super().forward(x)


class Blocks(nn.Module):
    """Three blocks over a sequence of four values, and a head over its mean."""

    def __init__(self, kind=None):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.blocks = nn.ModuleList(
            nn.Sequential(layer(4, 4), nn.Tanh(), self.last(kind))
            for layer in (Counted, nn.Linear, nn.Linear)
        )
        self.head = nn.Linear(4, 2)
        self.double()

    def last(self, kind):
        if kind == "batch norm":
            return nn.BatchNorm1d(5, track_running_stats=False)
        return nn.Dropout(0.5 * (kind == "dropout"))

    def forward(self, x):
        h = first = self.blocks[0](x)
        for block in self.blocks[1:]:
            h = block(h)
        h = h + first if self.kind == "skip" else h
        return self.head(h.mean(1)) * (3 if self.kind == "scaled" else 1)


def world(**arguments):
    """Three clients with 40 samples, which are 12 different ones."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 5, 4))[rng.integers(12, size=40)], rng.integers(2, size=40)
    parts = dict(client_ids=np.arange(40) % 3, partition=Natural(), protocol=SplitOwn(0.3, 0.0))
    return TensorDataModule(torch.from_numpy(x), torch.from_numpy(y), **parts, **arguments)


class Start(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        SEEN[0] = 0


def run(fit, kind, trainable, engine="auto", network=None, **data):
    torch.manual_seed(1)
    method = kind(network or Blocks(), trainable=trainable, engine=engine, lr=0.3, batch_size=4)
    fit(method, world(**data), 3, callbacks=[Start()])
    return method, method.run.loop.client_data(method.device)


CASES = {
    "head": (FedAvg, "head", (12, 4)),
    "pooled": (GlobalTrain, "head", (12, 4)),
    "last block": (FedSALoRA, LoRA(2, last_blocks=1), (12, 5, 4)),
}


@pytest.mark.parametrize("memory", [1 << 40, 0], ids=["memory", "file"])
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_the_whole_network(fit, case, memory, monkeypatch):
    """Against the engine `sequential`, which runs the whole network for every sample."""
    monkeypatch.setattr(frozen_part, "free_memory", lambda: memory)
    kind, trainable, shape = CASES[case]
    whole, data = run(fit, kind, trainable, "sequential")
    assert data.frozen is None
    assert SEEN[0] > 3 * 20  # every round
    method, data = run(fit, kind, trainable)
    assert SEEN[0] == 0  # not once after the set-up
    assert data.frozen[1].shape == shape
    torch.testing.assert_close(method.global_model, whole.global_model, rtol=0, atol=1e-12)
    assert method.row.keys() == whole.row.keys()
    for name in {"train/loss", "test/global/loss", "test/personalized/loss"} & whole.row.keys():
        np.testing.assert_allclose(method.row[name], whole.row[name], rtol=1e-12)


@pytest.mark.parametrize(
    "kind", ["dropout", "batch norm", "skip", "a transform", "the first block"]
)
def test_where_results_would_differ_nothing_is_stored(fit, kind):
    """The output of a first block that is used again is not what a later block is given.

    BatchNorm makes the output for a sample depend on the mini-batch.
    """
    data = {"transforms": [Normalize()]} if kind == "a transform" else {}
    trainable = LoRA(2, last_blocks=3 if kind == "the first block" else 1)
    assert run(fit, FedAvg, trainable, network=Blocks(kind), **data)[1].frozen is None


def test_a_head_whose_output_is_changed_keeps_its_body(fit):
    assert run(fit, FedAvg, "head", network=Blocks("scaled"))[1].frozen is None


def test_another_run_on_the_same_data_has_its_own_rows(fit, tmp_path):
    """A changed body, and nothing else, runs again."""
    method, data = run(fit, FedAvg, "head")
    rows, loop, network = data.frozen[1], method.run.loop, Blocks()
    for change, same in ((0.0, True), (0.1, False)):
        network.blocks[0][0].weight.data += change
        trainer = quiet(tmp_path, 1, enable_checkpointing=False, precision="64-true")
        trainer.fit(FedAvg(copy.deepcopy(network), trainable="head", lr=0.1), loop)
        assert (data.frozen[1] is rows) == same


def test_a_body_without_parameters_is_not_stored(fit):
    """All parameters of a logistic regression are in its head; its images would become floats."""
    data = DigitsDataModule(num_clients=3)
    method = FedAvg(LogisticRegression(64), lr=0.1)
    fit(method, data, 1)
    assert method.run.loop.client_data(method.device).samples.inputs is data.samples.inputs
