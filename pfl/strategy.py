"""Several processes that train different clients and meet once a round."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from pfl.errors import ConfigError
from pfl.launch import Launcher
from pfl.rows import Part


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
    patience: ClassVar[timedelta | None] = None
    """How long one process waits for another: `timeout` of the strategy in use."""

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
        ClientParallelStrategy.patience = self._timeout
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


def add_up(values: Tensor) -> Tensor:
    """The sum over processes, in place. Every process takes part, also one without clients.

    Lightning's `reduce` would let them wait for each other once more.
    """
    if _several():
        torch.distributed.all_reduce(values)
    return values


def gather(value: Any) -> list[Any]:
    """`value` of every process, by rank, on every process; a list of one without processes."""
    if not _several():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    group = _by_gloo(torch.distributed.group.WORLD)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def gather_parts(parts: Iterator[Part], empty: Callable[[Tensor], Tensor]) -> list[Part]:
    """All processes' parts, by rank, on the first process, and none on the others.

    They travel one at a time: all of them may be more than fits into memory.

    Args:
        empty: Makes room for a received tensor like one without values.
    """
    if not _several():
        return list(parts)
    if torch.distributed.get_rank() > 0:
        _send(parts)
        return []
    others = range(1, torch.distributed.get_world_size())
    return [*parts, *(part for rank in others for part in _receive(rank, empty))]


def _send(parts: Iterator[Part]) -> None:
    group = _by_gloo(torch.distributed.group.WORLD)
    for part in parts:
        tensors = {name: value for name, value in part.items() if isinstance(value, Tensor)}
        outline = part | {name: tensor.to("meta") for name, tensor in tensors.items()}
        torch.distributed.send_object_list([outline], 0, group)
        for tensor in tensors.values():
            torch.distributed.send(tensor, 0, group)
    torch.distributed.send_object_list([None], 0, group)


def _receive(rank: int, empty: Callable[[Tensor], Tensor]) -> Iterator[Part]:
    group = _by_gloo(torch.distributed.group.WORLD)
    while True:
        received: list[Any] = [None]
        torch.distributed.recv_object_list(received, rank, group)
        (part,) = received
        if part is None:
            return
        for name, value in part.items():
            if isinstance(value, Tensor):
                part[name] = empty(value)
                torch.distributed.recv(part[name], rank, group)
        yield part


@lru_cache(maxsize=1)
def _by_gloo(world: object) -> Any:
    """All processes, through host memory: NCCL would put everything on the GPUs at once."""
    timeout = ClientParallelStrategy.patience
    return torch.distributed.new_group(backend="gloo", timeout=timeout)


def gather_rows(chunks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One table of all processes' chunks, sorted by its columns from left to right."""
    everyone = [chunk for process in gather(chunks) for chunk in process]
    if not everyone:
        return {}
    table = {name: np.concatenate([chunk[name] for chunk in everyone]) for name in everyone[0]}
    order = np.lexsort(list(table.values())[::-1])
    return {name: column[order] for name, column in table.items()}


def _several() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
