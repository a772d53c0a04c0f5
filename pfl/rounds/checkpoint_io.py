"""Checkpoint files that are written and read piece by piece, and checked before they are used."""

from __future__ import annotations

import io
import os
import re
import zipfile
import zlib
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import Tensor

from pfl.datamodules.files import new_file
from pfl.errors import ConfigError
from pfl.files import create_secret
from pfl.randomness import KEY_BYTES

PIECE = 1 << 22  # bytes that are read at a time while checksums are verified
BEFORE = "previous.ckpt"
SECRET = "secret"
"""The name under which a federated checkpoint has a private run's key; it goes to `KEY_FILE`."""
KEY_FILE = "noise.key"
"""The file beside the checkpoints of a private run, with the key of its noise and cohorts."""


class StreamedCheckpointIO(TorchCheckpointIO):
    """Writes and reads checkpoints that do not fit into memory, because client states may not.

    Lightning's `TorchCheckpointIO` writes a checkpoint into a buffer first, and reads a whole file
    at once. Here the checksums of the file are also verified before the file is used, and
    `last.ckpt` is kept as `previous.ckpt` when the next `last.ckpt` takes its place. The secret key
    of a private run is not in the checkpoint, but in `noise.key` beside it, which only the owner of
    the file may read (mode 600).

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
        federated = checkpoint.get("federated", {})
        secret = federated.pop(SECRET, None)
        if "://" in path:  # a remote store, which Lightning supports
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            if secret is not None:
                write_key(Path(path).parent / KEY_FILE, secret)
            with new_file(Path(path)) as part:
                torch.save(checkpoint, part)
                if os.path.basename(path) == "last.ckpt":
                    _keep(Path(path))
        except BaseException as error:
            if (reason := _disk_error(error)) is not None:
                raise ConfigError(f"{path}: the checkpoint cannot be saved ({reason})") from error
            if entry := _unsaved(checkpoint):
                raise ConfigError(
                    f"{path}: the checkpoint cannot be saved; {entry}: {error}; return "
                    f"tensors, numbers and texts there"
                ) from error
            raise

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Maps the file into memory: rows are read when they are put into the store.

        Raises:
            ConfigError: The file is damaged.
        """
        only = weights_only is not False  # Lightning would unpickle anything from an address
        if not os.path.isfile(path):  # remote or missing: Lightning has the message
            return super().load_checkpoint(path, map_location, only)
        verify(Path(path))
        try:
            loaded = torch.load(path, map_location=map_location, mmap=True, weights_only=only)
        except Exception as error:  # whatever a file that was changed leads to
            raise damage_error(Path(path), refusal_reason(error)) from error
        key = Path(path).parent / KEY_FILE
        if key.is_file() and isinstance(loaded.get("federated"), dict):
            loaded["federated"][SECRET] = read_key(key)
        return loaded


def last_checkpoint(run: Path) -> Path:
    """Returns where the last checkpoint of a run is, from the run's folder."""
    return run / "checkpoints" / "last.ckpt"


def write_key(path: Path, secret: bytes) -> None:
    """Writes a key, which only the owner of the file may read."""
    if path.is_file() and path.read_text(encoding="utf-8").strip() == secret.hex():
        return
    with new_file(path) as part:
        part.unlink(missing_ok=True)
        create_secret(part, secret.hex() + "\n")


def read_key(path: Path, option: str = "ckpt_path") -> bytes:
    """Returns the key in a file.

    Args:
        path: The file.
        option: What names the file's folder, for the message.

    Raises:
        ConfigError: The file has something else.
    """
    try:
        secret = bytes.fromhex(path.read_text(encoding="utf-8").strip())
    except ValueError:
        secret = b""
    if len(secret) != KEY_BYTES:
        raise ConfigError(f"{option}: {path} is damaged; it must have {2 * KEY_BYTES} hex digits")
    return secret


def verify(path: Path) -> None:
    """Reads a whole checkpoint once and compares its parts with their checksums (CRC-32).

    PyTorch writes the checksums but does not compare them when it reads a file.

    Raises:
        ConfigError: The file is damaged, or is not a checkpoint; the message offers the checkpoint
            before it, if there is one.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for part in archive.infolist():
                with archive.open(part) as file:
                    while file.read(PIECE):  # the last piece raises if the checksum differs
                        pass
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise damage_error(path, str(error)) from error
    except (EOFError, ValueError, IndexError, UnicodeDecodeError) as error:
        raise damage_error(path, "the file ends too early, or its parts do not fit") from error


def refusal_reason(error: Exception) -> str:
    """Returns why PyTorch has not read a file, without its advice to run code from the file."""
    if match := re.search(r"(?:GLOBAL|[Uu]nsupported (?:global|class)) ([\w.]+)", str(error)):
        return f"it has an object of the class {match[1]}; only tensors and plain values are read"
    if "mmap can only be used" in str(error):
        return "it is not a file of torch.save"
    return str(error).partition("\n")[0]


def damage_error(path: Path, reason: str) -> ConfigError:
    """Returns the error about a checkpoint that cannot be used."""
    return ConfigError(
        f"ckpt_path: {path} is damaged, or is not a checkpoint ({reason}){_offer(path)}"
    )


def restore_error(path: Path, error: Exception) -> ConfigError:
    """Returns the error about a checkpoint whose parts are missing or of another type.

    Args:
        path: The file.
        error: What was raised when the parts were restored; a `Malformed` says all in its words.
    """
    kind = "" if isinstance(error, Malformed) else f"{type(error).__name__}: "
    reason = shorten(kind + str(error), 200)
    return ConfigError(f"ckpt_path: {path} cannot be restored ({reason}){_offer(path)}")


class Malformed(ValueError):
    """A part of a checkpoint is missing, or is not what it has to be."""


def check_parts(saved: Any, own: Any, where: str) -> None:
    """Refuses saved values that are built in another way than those of the run itself.

    Args:
        saved: A part of a checkpoint.
        own: Such a part as this run has it: every key of its dictionaries must be in `saved`, with
            a value of the same kind; a tensor must be as floating, and have as many dimensions; a
            list must be at least as long. None stands for any value.
        where: The name of the part.

    Raises:
        Malformed: A value is missing, or of another kind.
    """
    if isinstance(own, dict) and isinstance(saved, dict):
        for key, value in own.items():
            if key not in saved:
                raise Malformed(f"{where}.{key} is missing")
            check_parts(saved[key], value, f"{where}.{key}")
    elif isinstance(own, list) and isinstance(saved, list):
        if len(saved) < len(own):
            raise Malformed(f"{where} has {len(saved)} entries, not {len(own)}")
        for number, (one, value) in enumerate(zip(saved, own, strict=False)):
            check_parts(one, value, f"{where}[{number}]")
    elif isinstance(own, Tensor) and isinstance(saved, Tensor):
        if (own.dim(), own.is_floating_point()) != (saved.dim(), saved.is_floating_point()):
            raise Malformed(f"{where} is a tensor of {saved.dtype} of {saved.dim()} dimensions")
    elif own is not None and type(saved) is not type(own):
        raise Malformed(f"{where} is {shorten(repr(saved), 40)}, not {type(own).__name__}")


def _offer(path: Path) -> str:
    before = path.with_name(BEFORE)
    return "" if path.name == BEFORE or not before.is_file() else f"; the one before is {before}"


def _keep(last: Path) -> None:
    """Gives the present `last.ckpt` the name `previous.ckpt` too, so that one of them exists."""
    if not last.exists():
        return
    try:
        link = last.with_name(f"{BEFORE}.part")
        link.unlink(missing_ok=True)
        os.link(last, link)
        os.replace(link, last.with_name(BEFORE))
        link.unlink(missing_ok=True)  # names of one file are not replaced by each other
    except OSError:  # a file system without links
        os.replace(last, last.with_name(BEFORE))


def _disk_error(error: BaseException) -> str | None:
    """Returns why a file could not be written; None if the disk is not the reason."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # PyTorch raises a RuntimeError without the system's reason.
    unwritten = ("unexpected pos", "iostream error", "PytorchStreamWriter failed", "be opened")
    if match := re.search(r"failed with strerror: (.+)", str(error)):
        return match[1]
    if isinstance(error, RuntimeError) and any(text in str(error) for text in unwritten):
        return "the disk is full, or does not take it"
    return None


def _unsaved(checkpoint: dict[str, Any]) -> str | None:
    """Returns the callback whose state cannot be pickled; None if there is none."""
    for name, state in checkpoint.get("callbacks", {}).items():
        try:
            torch.save(state, io.BytesIO())
        except Exception:
            return f"trainer.callbacks: state_dict of {name}"
    return None
