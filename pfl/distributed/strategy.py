"""The strategy of several processes that train different clients of a round."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry, CPUAccelerator
from lightning.pytorch.plugins import CheckpointIO, LayerSync, Precision
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.constants import default_pg_timeout

from pfl.distributed import collectives
from pfl.distributed.launch import ENDING, EndedBySignal, Launcher
from pfl.distributed.orphan import is_child
from pfl.errors import ConfigError
from pfl.machine import refuse_windows

Plugin: TypeAlias = Precision | ClusterEnvironment | CheckpointIO | LayerSync
Devices: TypeAlias = list[int] | str | int


class ClientParallelStrategy(DDPStrategy):
    """Trains different clients in several processes.

    Every process trains its share of the cohort; the algorithm adds up what the clients sent once
    a round. This is Lightning's `DDPStrategy` without its wrapper around the model, so local steps
    need no communication. `--trainer.strategy client_parallel --trainer.devices 2` runs two
    processes: one for each GPU or, on CPUs, each with half of the cores. docs/many-devices.md
    explains more.

    Args:
        processes_per_device: Number of processes that share a device; more than one if a process
            does not fill a GPU. They communicate by gloo through the host's memory, since NCCL
            refuses two processes on one GPU.
        process_group_backend: As in Lightning's `DDPStrategy`; "gloo" where NCCL does not reach
            the GPUs of other machines.
        timeout: The longest time a process waits for another.
        start_method: As in Lightning; "popen" starts the script once more for each process, and a
            notebook, which is no script, needs "fork".
        kwargs: All other arguments of Lightning's `DDPStrategy`.

    Raises:
        ConfigError: If `processes_per_device` is below 1.

    Example:
        >>> strategy = ClientParallelStrategy(processes_per_device=2)
        >>> strategy.parallel_devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
        >>> strategy.num_processes
        4
    """

    strategy_name = "client_parallel"

    def __init__(
        self,
        processes_per_device: int = 1,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        if processes_per_device < 1:
            key = f"trainer.strategy.processes_per_device: {processes_per_device}"
            raise ConfigError(f"{key}; it must be at least 1")
        self.processes_per_device = processes_per_device
        self._group_timeout = timeout
        self._runs_scripts = start_method == "popen"
        if processes_per_device > 1:
            process_group_backend = process_group_backend or "gloo"
        kwargs |= {"process_group_backend": process_group_backend, "start_method": start_method}
        super().__init__(timeout=timeout, **kwargs)

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device of each process on this machine, by local rank."""
        return self._device_by_rank

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        shared = self.processes_per_device
        self._device_by_rank = devices and [d for d in devices for _ in range(shared)]

    @cached_property
    def launcher(self) -> Any:
        processes = self.num_processes * self.num_nodes
        if processes > 1:
            refuse_windows(f"trainer.devices: {processes} processes")
        if not self._runs_scripts:
            return super().launcher
        assert self.cluster_environment is not None
        return Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_distributed(self) -> None:
        collectives.use_timeout(self._group_timeout)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        env = os.environ
        if attempt != "0" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun's store outlives the processes, and still has the addresses of those before.
            store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
            usual = "gloo"
            if self.root_device.type == "cuda":
                usual = "nccl"
            torch.distributed.init_process_group(
                self.process_group_backend or usual,
                store=PrefixStore(f"attempt {attempt}", store),
                rank=int(env["RANK"]),
                world_size=int(env["WORLD_SIZE"]),
                timeout=self._group_timeout,
            )
        super().setup_distributed()

    def configure_ddp(self) -> None:
        """Copies the first process's parameters and buffers to all processes; wraps nothing."""
        assert self.model is not None
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            values = tensor.detach().contiguous()
            torch.distributed.broadcast(values, 0)
            tensor.detach().copy_(values)

    def on_train_start(self) -> None:
        """Makes SIGTERM, SIGUSR1 and Ctrl-C end the run; only the first process prints a message.

        Lightning's handler waits for a broadcast. Not every process reaches that broadcast, so
        some processes would wait for ever.
        """
        super().on_train_start()
        if threading.current_thread() is not threading.main_thread() or not self._runs_scripts:
            return
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL if is_child() else _end)
        if is_child():
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def on_exception(self, exception: BaseException) -> None:
        if self._runs_scripts:
            self.launcher.end_others(exception)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers nothing: the names "ddp", "ddp_spawn" and so on keep meaning `DDPStrategy`."""


def _end(number: int, _: Any) -> None:
    signal.signal(number, signal.SIG_IGN)  # the clean-up must not be interrupted
    raise EndedBySignal(number)


StrategyRegistry.register(
    ClientParallelStrategy.strategy_name,
    ClientParallelStrategy,
    description="One process per device; processes train different clients",
)


def resolve_strategy(
    strategy: str | Strategy, accelerator: str | Accelerator, devices: Devices, num_nodes: int
) -> tuple[str | Strategy, Devices]:
    """Returns the strategy and the devices of a run.

    "auto" becomes a `ClientParallelStrategy` if several processes will run. On the CPUs of one
    machine that is one process if it has a thread for each device: processes were never faster
    (benchmarks/results/peers.md). A strategy object is returned as it is.

    Raises:
        ConfigError: If `strategy` is the name of a strategy that wraps or shards the model.
    """
    if isinstance(strategy, Strategy):
        return strategy, devices
    if strategy.lower() in StrategyRegistry:
        kind = StrategyRegistry[strategy.lower()]["strategy"]
        if issubclass(kind, ParallelStrategy) and not issubclass(kind, ClientParallelStrategy):
            raise ConfigError(
                f"trainer.strategy: {strategy!r} wraps or shards the model, which every process "
                f"needs whole to train its clients; use client_parallel"
            )
    if strategy != "auto":
        return strategy, devices
    here = _count_devices(accelerator, devices)
    elsewhere = num_nodes * _count_scheduled()
    on_cpu = accelerator == "cpu" or isinstance(accelerator, CPUAccelerator)
    if on_cpu and elsewhere == 1 and 1 < here <= (threads := torch.get_num_threads()):
        rank_zero_warn(
            f"trainer.devices: {devices}; one process with {threads} threads trains at least as "
            f"fast on CPUs, and runs; --trainer.strategy client_parallel starts {here} processes",
            category=UserWarning,
        )
        here = devices = 1
    if elsewhere * here == 1:
        return strategy, devices
    # In a notebook there is no script to start once more; Lightning forks there, too.
    if _interactive() and num_nodes == 1:
        return ClientParallelStrategy(start_method="fork"), devices
    return ClientParallelStrategy(start_method="popen"), devices


def _count_scheduled() -> int:
    """Returns the number of processes that torchrun or SLURM runs; 1 without them."""
    for environment in (TorchElasticEnvironment, SLURMEnvironment):
        if environment.detect():
            return environment().world_size()
    return 1


def _count_devices(accelerator: str | Accelerator, devices: Devices) -> int:
    """Returns the number of devices on this machine; 1 for values that Lightning will refuse."""
    if isinstance(accelerator, str):
        name = {"gpu": "cuda"}.get(accelerator, accelerator)
        accelerator = AcceleratorRegistry.get(name, "unknown")
    if isinstance(accelerator, str) or not accelerator.is_available() or devices in ([], 0, "0"):
        return 1
    if devices == "auto":
        devices = accelerator.auto_device_count()
        if _interactive():
            devices = 1
    return len(accelerator.get_parallel_devices(accelerator.parse_devices(devices)))


def _interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def without_requeue(
    plugins: Plugin | list[Plugin] | None, strategy: str | Strategy
) -> list[Plugin]:
    """Returns the plugins with SLURM's automatic requeue switched off.

    The requeue saves within a round, and starts the run anew.
    """
    if isinstance(plugins, Iterable):
        plugins = list(plugins)
    elif plugins:
        plugins = [plugins]
    else:
        plugins = []
    environments: list[Any] = [p for p in plugins if isinstance(p, ClusterEnvironment)]
    environments += filter(None, [getattr(strategy, "cluster_environment", None)])
    if not (environments or TorchElasticEnvironment.detect()) and SLURMEnvironment.detect():
        environments = [SLURMEnvironment()]  # as Lightning would
        plugins += environments
    for environment in environments:
        if isinstance(environment, SLURMEnvironment):
            environment.auto_requeue = False
    return plugins
