"""Checkpoint files that are written and read piece by piece."""

from __future__ import annotations

import os
import zipfile
from contextlib import suppress
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from pfl.errors import ConfigError


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
