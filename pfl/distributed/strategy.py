"""Several processes that train different clients and meet once a round."""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pfl.distributed import collectives
from pfl.distributed.launch import Launcher
from pfl.errors import ConfigError


class ClientParallelStrategy(DDPStrategy):
    """Lightning's DDP without its wrapper: nothing is synchronized inside a local step.

    Every process trains its share of the cohort; the algorithm adds up what the clients sent once
    a round. `--trainer.strategy client_parallel --trainer.devices 2` runs two processes: one for
    each GPU or, on CPUs, each with its share of the cores. docs/many-devices.md says more.

    Args:
        processes_per_device: How many processes share a device: more than one where a process does
            not fill a GPU. They then meet through the host's memory, by gloo, since NCCL refuses
            two processes on one GPU.
        kwargs: Everything else that Lightning's DDPStrategy takes.
    """

    strategy_name = "client_parallel"

    def __init__(self, processes_per_device: int = 1, **kwargs: Any) -> None:
        if processes_per_device < 1:
            raise ConfigError(
                f"trainer.strategy.processes_per_device: {processes_per_device}; "
                f"it must be at least 1"
            )
        self.processes_per_device = processes_per_device
        super().__init__(**kwargs)

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device of each process of this machine, by local rank."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        shared = self.processes_per_device
        self._parallel_devices = devices and [d for d in devices for _ in range(shared)]

    def _get_process_group_backend(self) -> str:
        if self.processes_per_device > 1:
            return self._process_group_backend or "gloo"
        return super()._get_process_group_backend()

    def setup_distributed(self) -> None:
        """Let the processes find each other."""
        collectives.use_timeout(self._timeout)
        super().setup_distributed()

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            super()._configure_launcher()

    def configure_ddp(self) -> None:
        """Start all processes from the first one's model; wrap nothing."""
        assert isinstance(self.model, LightningModule)
        _sync_module_states(self.model)

    def on_train_start(self) -> None:
        """Let signals end the run: the first process tells the user, and the others just end."""
        super().on_train_start()
        main = threading.current_thread() is threading.main_thread()
        if not (main and isinstance(self._launcher, Launcher)):
            return
        # Lightning's handler waits for a broadcast, into which not all processes come: some would
        # wait for ever.
        if self._launcher.is_child():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        else:
            signal.signal(signal.SIGTERM, _end)

    def on_exception(self, exception: BaseException) -> None:
        """An error in one process ends all of them."""
        if isinstance(self._launcher, Launcher):
            self._launcher.end_others(exception)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: DDP's variants stay DDP's, and this one is registered below."""


def _end(number: int, _: Any) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise SIGTERMException


StrategyRegistry.register(
    ClientParallelStrategy.strategy_name,
    ClientParallelStrategy,
    description="One process per device; processes train different clients",
)
