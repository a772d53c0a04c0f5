"""What a checkpoint holds beyond what Lightning saves: client states, ledger, identity."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from pfl.clients.memory_tiers import SMALLEST, mapped
from pfl.distributed.collectives import gather_parts
from pfl.errors import ConfigError

if TYPE_CHECKING:
    from pfl.method.module import FederatedModule


def save(algorithm: FederatedModule, partition: str) -> dict[str, Any]:
    """Tensors and plain values only, so that `torch.load(weights_only=True)` reads them.

    Rows live on the process that owns the client; the checkpoint has them all, so that a run can
    go on with another number of processes. Every process must call this; the first one, which
    writes the file, has the rows.
    """
    return {
        **_identity(algorithm, partition),
        "rounds": algorithm.rounds,
        "samples_seen": algorithm.samples_seen,
        "bytes": [algorithm.bytes_down, algorithm.bytes_up],
        "clients": algorithm.store.state_dict(partial(gather_parts, empty=_empty)),
        "ledger": algorithm.client_bytes().state_dict(),
    }


def refuse_part_of_a_round(trainer: Trainer) -> None:
    """Some of its clients have trained, and would do so again in a run that goes on from there.

    Raises:
        ConfigError: A round has begun, and is not over.
    """
    progress = trainer.fit_loop.epoch_progress.current
    if progress.ready > progress.completed == trainer.global_step:  # a round is a step
        raise ConfigError(
            f"trainer.save_checkpoint: round {progress.ready} is not over, and no run could go on "
            f"from here; save once it is, as in on_train_epoch_end"
        )


def check(algorithm: FederatedModule, saved: dict[str, Any] | None, partition: str) -> None:
    """Refuse what another run has saved.

    Raises:
        ConfigError: It is no federated checkpoint, or one of another method, network or partition.
    """
    if saved is None:
        raise ConfigError("ckpt_path: this is not a checkpoint of a federated run")
    found = {**saved, "client states": sorted(saved["clients"])}
    wanted = {
        **_identity(algorithm, partition),
        "client states": sorted(algorithm.client_state_names),
    }
    for what, value in wanted.items():
        if found[what] != value:
            raise ConfigError(
                f"ckpt_path: the checkpoint's {what} is {found[what]}, this run's is {value}; "
                f"use the configuration that it was made with"
            )


def restore(algorithm: FederatedModule, saved: dict[str, Any]) -> None:
    """Put the rows of the clients that this process owns, and all counts, where they were."""
    algorithm.rounds, algorithm.samples_seen = saved["rounds"], saved["samples_seen"]
    algorithm.bytes_down, algorithm.bytes_up = saved["bytes"]
    rank, world = algorithm.trainer.global_rank, algorithm.trainer.world_size
    algorithm.store.load_state_dict(saved["clients"], lambda ids: ids % world == rank)
    if rank == 0:  # ledgers are added up over processes
        algorithm.ledger.load_state_dict(saved["ledger"])


def _identity(algorithm: FederatedModule, partition: str) -> dict[str, Any]:
    return {
        "algorithm": type(algorithm).__name__,
        "parameters": algorithm.space.size,
        "partition": partition,
    }


def _empty(like: Tensor) -> Tensor:
    """Room for rows of another process until they are written: in a file, where there are many."""
    if like.nbytes < SMALLEST:
        return torch.empty_like(like, device="cpu")
    what = "a checkpoint of several processes: what the others' clients remember"
    return mapped(like.numel(), like.dtype, what).view(like.shape)
