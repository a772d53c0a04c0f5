"""The loggers of Lightning by configuration, read back with the loggers' own packages."""

from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger

from datamodules import DigitsDataModule
from models import MLP
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedAvg
from pfl.cli import main
from tests.commands import ROOT, table

ROUNDS = 2
NAMES = ("train/loss", "test/global/accuracy", "test/personalized/loss", "comm/uplink_bytes")


def fit(logger, *args):
    """Runs the quickstart with a logger; returns the rows of `metrics.csv`."""
    configs = [f"--config={ROOT / 'configs' / name}" for name in ("quickstart.yaml", logger)]
    small = ("--data.num_clients=6", "--data.partition.alpha=1.0", "--model.local_epochs=1")
    trainer = (f"--trainer.max_epochs={ROUNDS}", "--trainer.callbacks=[]", "--trainer.name=run")
    assert main(["fit", *configs, *small, *trainer, "--trainer.accelerator=cpu", *args]) == 0
    return table(Path.cwd() / "runs" / "run" / "metrics.csv")


def check_configuration(folder, logger):
    """Compares the file that a logger has written with the run's own."""
    content = yaml.safe_load((folder / f"runs/{logger}/version_0/hparams.yaml").read_text())
    assert content == yaml.safe_load((folder / "runs/run/config.yaml").read_text())
    assert content["data"]["init_args"]["num_clients"] == 6


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_csv(here):
    expected = fit("logger/csv.yaml")
    check_configuration(here, "csv")
    check_rows(table(here / "runs/csv/version_0/metrics.csv"), expected)


def check_rows(rows, expected):
    """Compares the rows of a CSV logger with the run's own: a row for each round."""
    assert [int(row["step"]) for row in rows] == list(range(len(expected)))
    for row, line in zip(rows, expected, strict=True):
        assert float(row["epoch"]) == float(row["step"])
        assert {name: float(row[name]) for name in line} == {k: float(v) for k, v in line.items()}


def test_csv_of_a_resumed_run_has_all_rounds(here):
    fit("logger/csv.yaml", "--trainer.max_epochs=1")
    expected = fit("logger/csv.yaml", "--ckpt_path=auto")
    assert len(expected) == ROUNDS
    check_rows(table(here / "runs/csv/version_1/metrics.csv"), expected)


def test_csv_of_a_fixed_version_has_all_rounds_of_a_resumed_run(here):
    """Lightning deletes the file, and warns of it."""
    fixed = "--trainer.logger.version=0"
    fit("logger/csv.yaml", fixed, "--trainer.max_epochs=1")
    with pytest.warns(UserWarning, match="version_0 exists and is not empty"):
        expected = fit("logger/csv.yaml", fixed, "--ckpt_path=auto")
    check_rows(table(here / "runs/csv/version_0/metrics.csv"), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard(here):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    expected = fit("logger/tensorboard.yaml")
    read = events.EventAccumulator(str(here / "runs/tensorboard/version_0"))
    read.Reload()
    check_configuration(here, "tensorboard")
    for name in (*NAMES, "round"):
        steps, logged = zip(*((e.step, e.value) for e in read.Scalars(name)), strict=True)
        assert steps == tuple(range(ROUNDS))
        values = [float(line[name]) for line in expected]
        assert logged == pytest.approx(values, rel=1e-6)  # the file has float32


class Fixed(CSVLogger):
    """A logger that takes no other configuration than its first, as MLflow's do."""

    def log_hyperparams(self, params=None):
        raise ValueError("changing values is not allowed")


def test_a_run_goes_on_where_a_logger_refuses_the_configuration(here):
    trainer = Trainer(max_epochs=1, logger=Fixed(here), enable_progress_bar=False)
    with pytest.warns(UserWarning, match="Fixed does not take the run's configuration: changing"):
        trainer.fit(FedAvg(MLP(64, [4])), datamodule=FederatedLoop(DigitsDataModule(6)))
    assert len(trainer.recorder.rows) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of a package that is not one of ours
def test_mlflow(here):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    expected = fit("logger/mlflow.yaml")
    client = mlflow.MlflowClient(f"sqlite:///{here}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("pfl").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["data/init_args/num_clients"] == "6"
    assert run.data.params["model/class_path"] == "pfl.algorithms.FedSLR"
    for name in (*NAMES, "round"):
        logged = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
        assert logged == [(number, float(line[name])) for number, line in enumerate(expected)]
