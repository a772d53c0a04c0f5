"""What a checkpoint holds beyond what Lightning saves: client states, ledger, counts, identity."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pfl.clients.memory_tiers import SMALLEST, mapped
from pfl.clients.store import ClientStore
from pfl.communication import Ledger
from pfl.distributed.collectives import gather_parts
from pfl.errors import ConfigError
from pfl.method.module import FederatedModule


def save(module: FederatedModule, partition: str, ledger: Ledger) -> dict[str, Any]:
    """Returns tensors and plain values only, which `torch.load(weights_only=True)` reads.

    Rows of client states live on the process that owns the client. The checkpoint has the rows of
    all processes, so that a run can go on with another number of processes. Every process must
    call this function; the first process, which writes the file, gets the rows.

    Args:
        module: The method.
        partition: The hash of the partition.
        ledger: Every client's bytes, over all processes.
    """
    return {
        **_identity(module, partition),
        "rounds": module.rounds,
        "samples_seen": module.samples_seen,
        "bytes": [module.bytes_down, module.bytes_up],
        "clients": client_states(module.store),
        "ledger": ledger.state_dict(),
    }


def client_states(store: ClientStore) -> dict[str, Any]:
    """Returns the rows of all processes on the first process; every process must call it."""
    return store.state_dict(partial(gather_parts, empty=_empty))


def check(module: FederatedModule, saved: dict[str, Any] | None, partition: str) -> None:
    """Refuses a checkpoint that does not fit the run.

    Raises:
        ConfigError: The file is no federated checkpoint, or its method, network, partition or
            client states are not those of the run.
    """
    if saved is None:
        raise ConfigError("ckpt_path: this is not a checkpoint of a federated run")
    actual = {**saved, "client states": sorted(saved["clients"])}
    expected = {
        **_identity(module, partition),
        "client states": sorted(module.client_state_names),
    }
    for what, value in expected.items():
        if actual[what] != value:
            raise ConfigError(
                f"ckpt_path: the checkpoint's {what} is {actual[what]}, this run's is {value}; "
                f"use the configuration that it was made with"
            )


def restore(module: FederatedModule, saved: dict[str, Any], rank: int, world: int) -> None:
    """Takes all counts over, and the rows of the clients that process `rank` of `world` owns."""
    module.rounds, module.samples_seen = saved["rounds"], saved["samples_seen"]
    module.bytes_down, module.bytes_up = saved["bytes"]
    module.store.load_state_dict(saved["clients"], lambda ids: ids % world == rank)
    if rank == 0:  # ledgers are added up over processes
        module.ledger.load_state_dict(saved["ledger"])


def _identity(module: FederatedModule, partition: str) -> dict[str, Any]:
    return {
        "algorithm": type(module).__name__,
        "parameters": module.space.size,
        "partition": partition,
    }


def _empty(like: Tensor) -> Tensor:
    """Returns room for rows of another process until they are written, in a file if it is large."""
    if like.nbytes < SMALLEST:
        return torch.empty_like(like, device="cpu")
    what = "a checkpoint of several processes: what the others' clients remember"
    return mapped(like.numel(), like.dtype, what).view(like.shape)
