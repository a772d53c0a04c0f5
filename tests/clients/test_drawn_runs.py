"""Runs on samples that are drawn when asked for."""

from dataclasses import replace

import pytest
import torch

from datamodules import Ragged, Sampled, SharedTest, SplitOwn, TensorDataModule
from models import LogisticRegression
from pfl.algorithms import FedAvg, LocalTrain
from tests.problems import run


@pytest.mark.parametrize("method", [FedAvg, LocalTrain])
@pytest.mark.parametrize("protocol", [SplitOwn(0.3, 0.2), SharedTest(0.2)], ids=repr)
def test_a_run_is_the_same_with_stored_samples(method, protocol, tmp_path):
    def result(store):
        torch.manual_seed(1)
        x = torch.randn(50, 4)
        test = (x[:9] + 1, torch.arange(9) % 3)
        data = TensorDataModule(
            x, torch.arange(50) % 3, *test, num_clients=70, partition=Sampled(11), protocol=protocol
        )
        if store:
            drawn = data.partition.splits.items()
            kept = {k: Ragged.from_sizes(p.flat, p.sizes) for k, p in drawn if not p.is_shared}
            data._partition = replace(data.partition, **kept)
        learner = method(LogisticRegression(4, 3), lr=0.1, batch_size=3)
        loop = {"clients_per_round": 20, "clients_at_once": 8}
        trainer = run(learner, data, 3, root=tmp_path, precision=None, **loop).trainer
        return trainer.recorder.rows, (trainer.run_dir / "clients.csv").read_bytes()

    drawn, stored = result(False), result(True)
    assert drawn == stored
    assert len(drawn[0]) == 3 and "test_" in drawn[1].decode().splitlines()[0]
