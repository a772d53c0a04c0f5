"""Several processes that train different clients and meet once a round."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry


class ClientParallelStrategy(DDPStrategy):
    """Lightning's DDP without its wrapper: nothing is synchronized inside a local step.

    Every process trains its share of the cohort; the algorithm adds up what the clients sent once
    a round. `--trainer.strategy client_parallel --trainer.devices 2` runs two processes: one for
    each GPU or, on CPUs, each with its share of the cores.
    """

    strategy_name = "client_parallel"

    def configure_ddp(self) -> None:
        """Start all processes from the first one's model; wrap nothing."""
        assert isinstance(self.model, LightningModule)
        _sync_module_states(self.model)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: DDP's variants stay DDP's, and this one is registered below."""


StrategyRegistry.register(
    ClientParallelStrategy.strategy_name,
    ClientParallelStrategy,
    description="One process per device; processes train different clients",
)


def gather(value: Any) -> list[Any]:
    """`value` of every process, by rank, on every process; a list of one without processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
