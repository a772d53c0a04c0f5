"""What a checkpoint holds beyond what Lightning saves: client states, ledger, identity."""

from __future__ import annotations

import os
import zipfile
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Trainer
from torch import Tensor

from pfl.errors import ConfigError
from pfl.strategy import gather_parts
from pfl.tiers import SMALLEST, mapped

if TYPE_CHECKING:
    from pfl.algorithms.module import FederatedModule


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
    wanted = {**_identity(algorithm, partition), "client states": sorted(algorithm.remembered)}
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


class StreamedCheckpointIO(TorchCheckpointIO):
    """Checkpoints that are never in memory as a whole: what clients remember may be larger.

    Lightning's own way writes them into a buffer first, and reads all of a file at once.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write the file under another name first: there is a whole one at any time.

        Raises:
            ConfigError: There is no room for it.
        """
        path = os.fspath(path)
        if "://" in path:  # a remote store, of which Lightning knows more
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            torch.save(checkpoint, path + ".part")
            os.replace(path + ".part", path)
        except BaseException as error:
            with suppress(OSError):
                os.remove(path + ".part")
            if (reason := _of_the_disk(error)) is not None:
                raise ConfigError(f"{path}: the checkpoint cannot be saved ({reason})") from error
            raise

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Map the file: rows are read when they are put into the store."""
        if not zipfile.is_zipfile(path):  # remote, missing or broken: Lightning says which
            return super().load_checkpoint(path, map_location, weights_only)
        only = weights_only is not False
        return torch.load(path, map_location=map_location, mmap=True, weights_only=only)


def _of_the_disk(error: BaseException) -> str | None:
    """Why a file could not be written; None where the error is something else."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # PyTorch does not say what the system has said.
    unwritten = ("unexpected pos", "iostream error", "PytorchStreamWriter failed", "be opened")
    if isinstance(error, RuntimeError) and any(text in str(error) for text in unwritten):
        return "the disk is full, or does not take it"
    return None
