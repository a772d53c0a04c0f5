"""What the Trainer takes, beyond Lightning's own."""

from pathlib import Path

import pytest
import torch
from lightning.fabric.accelerators import MPSAccelerator
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import LightningDataModule
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector

from datamodules import DigitsDataModule
from models import MLP
from pfl import ClientParallelStrategy, FederatedLoop, Trainer
from pfl.algorithms import FedAvg
from pfl.errors import ConfigError
from tests.refusal import refused


@pytest.fixture
def apple(monkeypatch):
    """A machine with an Apple GPU, as far as Lightning asks for one."""
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))


def test_auto_means_the_cpu_where_there_is_an_apple_gpu(tmp_path, apple):
    """It has no float64, which sums over samples and clients need."""
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
    """A machine with three GPUs, as far as Lightning asks for them."""
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: False))
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: 3))
    monkeypatch.setattr(CUDAAccelerator, "parse_devices", staticmethod(parsed))
    monkeypatch.setattr(accelerator_connector, "_select_auto_accelerator", lambda: "cuda")


def parsed(devices):
    """Indices of the GPUs that `devices` means."""
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


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [(1, [0]), ([2], [2]), (2, [0, 1]), ([0, 2], [0, 2]), (-1, [0, 1, 2]), ("auto", [0, 1, 2])],
)
def test_several_gpus_train_different_clients(tmp_path, gpus, devices, wanted):
    strategy = Trainer(devices=devices, default_root_dir=tmp_path).strategy
    if len(wanted) == 1:
        assert type(strategy) is SingleDeviceStrategy
        assert strategy.root_device == torch.device("cuda", wanted[0])
    else:
        assert type(strategy) is ClientParallelStrategy
        assert strategy.parallel_devices == [torch.device("cuda", index) for index in wanted]


@pytest.mark.parametrize("strategy", ["ddp", "DDP", "ddp_spawn", "fsdp", "deepspeed_stage_2"])
def test_strategies_that_wrap_the_model_are_refused(tmp_path, strategy):
    with refused(f"trainer.strategy: {strategy!r}", "use client_parallel"):
        Trainer(strategy=strategy, devices=2, default_root_dir=tmp_path)


def test_a_strategy_of_ones_own_is_kept(tmp_path):
    own = DDPStrategy()
    trainer = Trainer(strategy=own, devices=2, accelerator="cpu", default_root_dir=tmp_path)
    assert trainer.strategy is own


def test_slurm_does_not_save_within_a_round(tmp_path):
    Trainer(default_root_dir=tmp_path, plugins=[slurm := SLURMEnvironment()])
    assert not slurm.auto_requeue


def test_data_that_no_clients_own_are_refused():
    with refused("datamodule: LightningDataModule", "FederatedDataModule"):
        FederatedLoop(LightningDataModule())


# ---- going on -----------------------------------------------------------------------------------


def fit(rounds, ckpt_path=None, run=Trainer.fit):
    trainer = Trainer(max_epochs=rounds, accelerator="cpu", enable_progress_bar=False)
    data = FederatedLoop(DigitsDataModule(6))
    run(trainer, FedAvg(MLP(64, [4])), datamodule=data, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.filterwarnings("error:The dirpath has changed")
def test_a_resumed_run_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs", "run")
    last = folder / "checkpoints" / "last.ckpt"
    assert fit(2).run_dir == folder and last.is_file()
    for rounds in (0, 1):
        with refused(f"trainer.max_epochs: {rounds};", "at least 2"):
            fit(rounds, str(last))
    assert fit(1, str(last), run=Trainer.test).run_dir == folder  # which goes through no round
    for rounds in (2, 3):
        resumed = fit(rounds, str(last))
        assert resumed.run_dir == folder and resumed.current_epoch == rounds
        nothing = f"Nothing to do: {last} has been through 2 rounds"
        assert (nothing in capsys.readouterr().out) == (rounds == 2)
    assert [path.name for path in Path("runs").iterdir()] == ["run"]


def test_a_run_is_found_from_within_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = (fit(1).run_dir / "checkpoints").resolve()
    monkeypatch.chdir(folder)
    with pytest.warns(UserWarning, match="The dirpath has changed"):  # which is true
        assert fit(2, "last.ckpt").run_dir.resolve() == folder.parent


def test_home_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Trainer(default_root_dir="~/runs", enable_progress_bar=False).root == tmp_path / "runs"
