"""The Trainer's own arguments, and what differs from Lightning's Trainer."""

import warnings
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.accelerators import MPSAccelerator
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import LightningDataModule
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from datamodules import IID, ArrayDataModule, DigitsDataModule, SplitOwn, TensorDataModule
from models import MLP
from pfl import ClientParallelStrategy, FederatedLoop, Trainer
from pfl.algorithms import FedAvg
from pfl.errors import ConfigError
from tests.problems import quiet, run
from tests.refusal import refused


@pytest.fixture
def apple(monkeypatch):
    """A machine on which Lightning sees an Apple GPU."""
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))


def test_auto_means_the_cpu_where_there_is_an_apple_gpu(tmp_path, apple):
    """An Apple GPU has no float64, which sums over samples and clients need."""
    trainer = Trainer(default_root_dir=tmp_path, enable_progress_bar=False)
    assert isinstance(trainer.accelerator, CPUAccelerator)


@pytest.mark.parametrize("accelerator", ["mps", "gpu"])
def test_an_apple_gpu_is_refused(tmp_path, apple, accelerator):
    message = f"trainer.accelerator: '{accelerator}' .* no float64 .*; use cpu"
    with pytest.raises(ConfigError, match=message):
        Trainer(accelerator=accelerator, default_root_dir=tmp_path, enable_progress_bar=False)


# ---- strategies ---------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """A machine on which Lightning sees three GPUs."""
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: False))
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: 3))
    monkeypatch.setattr(CUDAAccelerator, "parse_devices", staticmethod(parsed))


def parsed(devices):
    """The indices of the GPUs that `devices` means."""
    if isinstance(devices, list):
        return devices
    return list(range(3 if int(devices) == -1 else int(devices)))


@pytest.mark.parametrize(
    ("arguments", "processes"),
    [
        ({}, 1),
        ({"devices": 2}, 2),
        ({"devices": "2"}, 2),
        ({"num_nodes": 2}, 1),  # on this machine
        ({"devices": 2, "strategy": "client_parallel"}, 2),
    ],
)
def test_several_processes_train_different_clients(tmp_path, arguments, processes):
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, **arguments)
    several = len(arguments) > 0
    assert type(trainer.strategy) is (ClientParallelStrategy if several else SingleDeviceStrategy)
    assert (trainer.num_devices, trainer.num_nodes) == (processes, arguments.get("num_nodes", 1))
    assert trainer.world_size == processes * trainer.num_nodes


@pytest.mark.parametrize("accelerator", ["cpu", CPUAccelerator()])
def test_threads_take_the_place_of_processes_on_cpus(tmp_path, monkeypatch, accelerator):
    """A process with fewer threads than devices does not."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.warns(UserWarning, match="trainer.devices: 2; one process with 2 threads"):
        one = Trainer(accelerator=accelerator, devices=2, default_root_dir=tmp_path)
    assert one.world_size == 1
    three = Trainer(accelerator=accelerator, devices=3, default_root_dir=tmp_path)
    assert three.world_size == 3


@pytest.mark.parametrize(
    ("devices", "indices"),
    [(1, [0]), ([2], [2]), (2, [0, 1]), ([0, 2], [0, 2]), (-1, [0, 1, 2]), ("auto", [0, 1, 2])],
)
def test_several_gpus_train_different_clients(tmp_path, gpus, devices, indices):
    strategy = Trainer(devices=devices, default_root_dir=tmp_path).strategy
    if len(indices) == 1:
        assert type(strategy) is SingleDeviceStrategy
        assert strategy.root_device == torch.device("cuda", indices[0])
    else:
        assert type(strategy) is ClientParallelStrategy
        assert strategy.parallel_devices == [torch.device("cuda", index) for index in indices]


@pytest.mark.parametrize("strategy", ["ddp", "DDP", "ddp_spawn", "fsdp", "deepspeed_stage_2"])
def test_strategies_that_wrap_the_model_are_refused(tmp_path, strategy):
    with refused(f"trainer.strategy: {strategy!r}", "use client_parallel"):
        Trainer(strategy=strategy, devices=2, default_root_dir=tmp_path)


def test_a_strategy_object_is_kept(tmp_path):
    own = DDPStrategy()
    trainer = Trainer(strategy=own, devices=2, accelerator="cpu", default_root_dir=tmp_path)
    assert trainer.strategy is own


# What torchrun and srun set for the first of two processes.
TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2"}
TORCHRUN |= {name: "0" for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_PORT")}
SLURM = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "1", "JOB_ID": "1", "JOB_NAME": "train"}
SLURM |= {name: "0" for name in ("PROCID", "LOCALID", "NODEID")}
SLURM = {f"SLURM_{name}": value for name, value in SLURM.items()}


def set_environment(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("variables", [TORCHRUN, SLURM], ids=["torchrun", "SLURM"])
def test_fewer_devices_than_scheduled_processes_are_refused(tmp_path, monkeypatch, variables):
    """Two processes with one device each would otherwise be two separate runs."""
    set_environment(monkeypatch, variables)
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, enable_progress_bar=False)
    with refused("trainer.devices", "devices=1", "2"):
        trainer.fit(FedAvg(MLP(64, [4])), datamodule=FederatedLoop(DigitsDataModule(6)))


@pytest.mark.parametrize("given", [True, False], ids=["given", "detected"])
def test_slurm_does_not_requeue(tmp_path, monkeypatch, given):
    """SLURM's requeue would save within a round."""
    own = SLURMEnvironment() if given else None
    set_environment(monkeypatch, SLURM)
    trainer = Trainer(accelerator="cpu", devices=2, default_root_dir=tmp_path, plugins=own)
    environment = trainer.strategy.cluster_environment
    assert type(environment) is SLURMEnvironment and not environment.auto_requeue
    assert own in (None, environment)


def test_data_without_clients_are_refused():
    with refused("datamodule: LightningDataModule", "FederatedDataModule"):
        FederatedLoop(LightningDataModule())


# ---- the process and its settings ---------------------------------------------------------------


class Intervals(pl.Callback):
    """Notes `check_val_every_n_epoch` at set-up and at the end of each round."""

    def __init__(self):
        self.at_setup, self.at_end = [], []

    def setup(self, trainer, pl_module, stage):
        self.at_setup.append(trainer.check_val_every_n_epoch)

    def on_train_epoch_end(self, trainer, pl_module):
        self.at_end.append(trainer.check_val_every_n_epoch)


class StopInFourthRound(pl.Callback):
    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.current_epoch == 3


@pytest.mark.parametrize(
    ("arguments", "callbacks"),
    [
        ({"max_epochs": 4}, []),
        ({"max_steps": 4, "max_epochs": -1}, []),
        ({"max_epochs": 9}, [StopInFourthRound()]),
    ],
    ids=["max_epochs", "max_steps", "should_stop"],
)
def test_the_last_round_is_evaluated_and_the_interval_stays(tmp_path, arguments, callbacks):
    """Rounds 3 and, as the last one, 4 are evaluated; a further fit begins with the interval."""
    seen = Intervals()
    own = dict(check_val_every_n_epoch=3, **arguments)
    trainer = quiet(tmp_path, own.pop("max_epochs"), seen, *callbacks, **own)
    method, data = FedAvg(MLP(64, [4])), FederatedLoop(DigitsDataModule(6), clients_at_once=2)
    trainer.fit(method, datamodule=data)
    evaluated = ["test/global/loss" in row for row in trainer.recorder.rows]
    assert evaluated == [False, False, True, True]
    assert seen.at_end == [3, 3, 3, 1]
    assert trainer.check_val_every_n_epoch == 3
    if trainer.max_epochs == 4:
        trainer.fit_loop.max_epochs = 5
        trainer.fit(method, datamodule=data)
        assert seen.at_end == [3, 3, 3, 1, 1]
    assert set(seen.at_setup) == {3}


class Bar(TQDMProgressBar):
    """Remembers what it shows after each round."""

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        self.shown = {**getattr(self, "shown", {}), pl_module.rounds: self.get_metrics(trainer, 0)}


@pytest.mark.parametrize("validation", [0.2, 0.0])
def test_bars_of_lightning_show_the_loss_and_the_score_that_counts(tmp_path, validation):
    """Scores are those of the last evaluation; here every second round is evaluated."""
    bar = Bar()
    settings = {"enable_progress_bar": True, "check_val_every_n_epoch": 2}
    trainer = quiet(tmp_path, 4, bar, **settings)
    data = DigitsDataModule(4, protocol=SplitOwn(test=0.2, validation=validation))
    trainer.fit(FedAvg(MLP(64, [4])), datamodule=FederatedLoop(data))
    score = f"{'val' if validation else 'test'}/global/accuracy"
    loss = [row["train/loss"] for row in trainer.recorder.rows]
    second, last = (trainer.recorder.rows[number][score] for number in (1, 3))
    assert bar.shown == {
        1: {"train/loss": loss[0]},
        2: {"train/loss": loss[1], score: second},
        3: {"train/loss": loss[2], score: second},
        4: {"train/loss": loss[3], score: last},
    }


def test_the_filters_of_warnings_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = list(warnings.filters)
    fit(1)
    assert warnings.filters == before


# ---- a run that continues -----------------------------------------------------------------------


def fit(rounds, ckpt_path=None, run=Trainer.fit):
    trainer = Trainer(max_epochs=rounds, accelerator="cpu", enable_progress_bar=False)
    data = FederatedLoop(DigitsDataModule(6))
    run(trainer, FedAvg(MLP(64, [4])), datamodule=data, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.filterwarnings("error:The dirpath has changed")
def test_a_resumed_run_writes_into_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs", "run")
    last = folder / "checkpoints" / "last.ckpt"
    assert fit(2).run_dir == folder and last.is_file()
    with refused("trainer.max_epochs: 1;", "at least 2"):
        fit(1, str(last))
    assert fit(1, str(last), run=Trainer.test).run_dir == folder  # trains no round
    for rounds in (2, 3):
        resumed = fit(rounds, str(last))
        assert resumed.run_dir == folder and resumed.current_epoch == rounds
        nothing = f"Nothing to do: {last} has been through 2 rounds"
        assert (nothing in capsys.readouterr().out) == (rounds == 2)
    assert [path.name for path in Path("runs").iterdir()] == ["run"]


def test_a_second_fit_without_rounds_left_names_the_method(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(max_epochs=1, accelerator="cpu", enable_progress_bar=False)
    method = FedAvg(MLP(64, [4]))
    for _ in range(2):
        trainer.fit(method, datamodule=FederatedLoop(DigitsDataModule(6)))
    assert "Nothing to do: FedAvg has been through 1 rounds" in capsys.readouterr().out


def test_a_run_is_found_from_within_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = (fit(1).run_dir / "checkpoints").resolve()
    monkeypatch.chdir(folder)
    with pytest.warns(UserWarning, match="The dirpath has changed"):  # it has
        assert fit(2, "last.ckpt").run_dir.resolve() == folder.parent


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Trainer(default_root_dir="~/runs", enable_progress_bar=False).root == tmp_path / "runs"


def test_a_run_in_float64_names_arrays_that_are_kept_in_float32(tmp_path):
    """`ArrayDataModule` alone rounds float64 arrays, and only a run in float64 loses by it."""

    def train(kind, precision):
        data = kind(np.full((20, 2), 0.1), np.arange(20) % 2, num_clients=2, partition=IID())
        run(FedAvg(torch.nn.Linear(2, 2)), data, 1, root=tmp_path, precision=precision)

    with pytest.warns(UserWarning, match="ArrayDataModule keeps inputs as float32"):
        train(ArrayDataModule, "64-true")
    train(ArrayDataModule, "32-true")  # a warning would be an error
    train(TensorDataModule, "64-true")
