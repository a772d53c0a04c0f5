"""What a run leaves out is printed at its end and recorded in summary.json."""

import json

import numpy as np
import torch

from datamodules import DigitsDataModule, Natural, TensorDataModule
from models import MLP
from pfl import FederatedLoop
from pfl.algorithms import FedAvg
from pfl.report.run_summary import left_out
from tests.problems import quiet


def fitted(data, root, capsys):
    """Trains for one round; returns the summary and what is printed."""
    torch.manual_seed(0)
    trainer = quiet(root, 1)
    features = int(np.prod(data.input_shape))
    trainer.fit(FedAvg(MLP(features, [4]), lr=0.1), datamodule=FederatedLoop(data))
    return json.loads((trainer.run_dir / "summary.json").read_text()), capsys.readouterr().out


def test_a_run_prints_what_natural_leaves_out(tmp_path, capsys):
    # Clients of 12, 8, 1 and 5 samples, of which three are kept: 1 sample has no client.
    ids = np.repeat([0, 1, 2, 3], [12, 8, 1, 5])
    inputs, labels = np.random.default_rng(0).random((26, 3)).astype(np.float32), ids % 2
    data = TensorDataModule(inputs, labels, num_clients=3, client_ids=ids, partition=Natural())
    summary, printed = fitted(data, tmp_path / "three", capsys)
    assert summary["samples_unused"] == 1 and "left out: 1 sample that no client has" in printed
    # With all four, the client with one sample has none to be tested on.
    data = TensorDataModule(inputs, labels, client_ids=ids, partition=Natural())
    summary, printed = fitted(data, tmp_path / "four", capsys)
    assert summary["samples_unused"] == 0 and summary["clients_without_test_samples"] == 1
    assert "left out: 1 client without test samples" in printed


def test_a_run_that_leaves_nothing_out_prints_nothing_of_it(tmp_path, capsys):
    summary, printed = fitted(DigitsDataModule(4), tmp_path, capsys)
    assert "left out" not in printed
    assert summary["clients_without_train_samples"] == summary["samples_unused"] == 0


def test_what_is_left_out_in_words():
    assert left_out({"samples_unused": 0, "round": 3}) == ""
    numbers = {"samples_unused": 1200, "clients_without_train_samples": 2}
    words = "1,200 samples that no client has, 2 clients without training samples"
    assert left_out(numbers) == words
