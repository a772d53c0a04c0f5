"""The optimality gap and the errors of runs in several processes and from the command line."""

import io
import math
import sys
from contextlib import redirect_stdout

import pytest
import yaml

from pfl.cli import main
from tests.commands import finish, table
from tests.optimality import ERRORS, is_ours

# One client alone leaves the second process without any.
FITS = {"FedAvg-5": 7, "LocalTrain-5": 3, "FedAvg-1": 7}  # name: number of columns
DRIVER = """
import sys
import torch
from datamodules import LeastSquares
from models import HalfSquaredError, LinearRegression
from pfl import FederatedLoop, Trainer, algorithms
from pfl.callbacks import Optimality

for name in {fits}:
    method, clients = name.split("-")
    torch.manual_seed(0)
    algorithm = getattr(algorithms, method)(
        LinearRegression(3), batch_size=None, loss=HalfSquaredError()
    )
    trainer = Trainer(
        name=name, max_epochs=2, default_root_dir=sys.argv[1], enable_progress_bar=False,
        enable_checkpointing=False, accelerator="cpu", precision="64-true",
        callbacks=[Optimality()], limit_val_batches=0, {trainer}
    )
    trainer.fit(algorithm, datamodule=FederatedLoop(LeastSquares(int(clients), 12, 3)))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_measure_the_same_as_one(tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    monkeypatch.setattr(sys, "argv", ["driver", str(one)])
    with redirect_stdout(io.StringIO()):
        exec(DRIVER.format(fits=list(FITS), trainer=""), {})
    script = tmp_path / "driver.py"
    parallel = "strategy='client_parallel', devices=2"
    script.write_text(DRIVER.format(fits=list(FITS), trainer=parallel))
    finish(script, two, cwd=tmp_path)
    for name, count in FITS.items():
        rows, others = (table(root / name / "metrics.csv") for root in (one, two))
        assert len(rows) == len(others) == 2
        for row, other in zip(rows, others, strict=True):
            ours = [key for key in row if is_ours(key)]
            assert len(ours) == count
            for key in ours:
                assert float(other[key]) == pytest.approx(float(row[key]), rel=1e-12)


COMMANDS = {
    "heterogeneous": (
        {
            "class_path": "LogisticRegression",
            "init_args": {"in_features": 10, "num_classes": 2, "bias": False},
        },
        {},
        {"class_path": "HeterogeneousLogistic", "init_args": {"test_samples": 20}},
        {f"train/global/{name}" for name in (*ERRORS, "gap")} | {"test/global/accuracy"},
    ),
    "least squares": (
        {"class_path": "LinearRegression", "init_args": {"in_features": 10}},
        {"loss": {"class_path": "models.HalfSquaredError"}},
        {"class_path": "LeastSquares", "init_args": {"condition": 30}},
        {f"train/personalized/{name}" for name in ERRORS},
    ),
    "agents": (
        {"class_path": "PenalizedLogisticRegression", "init_args": {"in_features": 20}},
        {"loss": {"class_path": "PenalizedCrossEntropy"}},
        {"class_path": "AgentLogistic", "init_args": {"non_iid": "strong", "num_clients": 5}},
        {"train/global/gap", "train/global/total_error"},
    ),
}


@pytest.mark.cli
@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_measures_theory_problems(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["pfl"])  # LightningCLI warns where it has arguments
    network, settings, data, expected = COMMANDS[name]
    config = {
        "trainer": {
            "name": "run",
            "default_root_dir": str(tmp_path),
            "max_epochs": 2,
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "callbacks": [{"class_path": "Optimality"}],
        },
        "model": {
            "class_path": "FedAvg",
            "init_args": {"network": network, "batch_size": None, **settings},
        },
        "data": data,
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", str(path)]) == 0, capsys.readouterr().err
    rows = table(tmp_path / "run" / "metrics.csv")
    assert len(rows) == 2
    assert expected <= rows[-1].keys()
    assert all(math.isfinite(float(rows[-1][name])) for name in expected)
