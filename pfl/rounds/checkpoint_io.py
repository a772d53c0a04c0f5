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
    """Writes and reads checkpoints that do not fit into memory, because client states may not.

    Lightning's `TorchCheckpointIO` writes a checkpoint into a buffer first, and reads a whole file
    at once.

    Example:
        >>> import torch
        >>> checkpoint_io = StreamedCheckpointIO()
        >>> checkpoint_io.save_checkpoint({"w": torch.ones(3)}, "checkpoints/last.ckpt")
        >>> checkpoint_io.load_checkpoint("checkpoints/last.ckpt")["w"]
        tensor([1., 1., 1.])
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Writes the file under another name first, so that a complete file exists at any time.

        Raises:
            ConfigError: The disk has no room for the file.
        """
        path = os.fspath(path)
        if "://" in path:  # a remote store, which Lightning supports
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            torch.save(checkpoint, path + ".part")
            os.replace(path + ".part", path)
        except BaseException as error:
            with suppress(OSError):
                os.remove(path + ".part")
            if (reason := _disk_error(error)) is not None:
                raise ConfigError(f"{path}: the checkpoint cannot be saved ({reason})") from error
            raise

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Maps the file into memory: rows are read when they are put into the store."""
        if not zipfile.is_zipfile(path):  # remote, missing or broken: Lightning has the message
            return super().load_checkpoint(path, map_location, weights_only)
        only = weights_only is not False
        return torch.load(path, map_location=map_location, mmap=True, weights_only=only)


def _disk_error(error: BaseException) -> str | None:
    """Returns why a file could not be written; None if the disk is not the reason."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # PyTorch raises a RuntimeError without the system's reason.
    unwritten = ("unexpected pos", "iostream error", "PytorchStreamWriter failed", "be opened")
    if isinstance(error, RuntimeError) and any(text in str(error) for text in unwritten):
        return "the disk is full, or does not take it"
    return None
