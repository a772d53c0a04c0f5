"""Readers and writers of the files in a run's folder, each of which changes as a whole."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor
from yaml import YAMLError

from pfl.datamodules import files
from pfl.errors import ConfigError

CSV_ROWS = 1 << 12  # rows that are Python numbers at a time: a million would take hundreds of MB
# What reading a damaged file raises; deep JSON and YAML raise a RecursionError.
UNREADABLE = (OSError, ValueError, RecursionError)
DAMAGE = (*UNREADABLE, LookupError, TypeError, AttributeError, StopIteration, YAMLError)
SIGNED = re.compile(r"[+-][0-9]+(\.[0-9]+)?")  # a number, such as the class -1 or +1
PIECE = 1 << 22  # bytes that are compared or copied at a time


@contextmanager
def run_folder_errors(folder: Path, key: str = "trainer.default_root_dir") -> Iterator[None]:
    """Turns an OSError from creating a folder, which `key` chose, into a ConfigError."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key}: there can be no folder {str(folder)!r}: {reason}") from error


def lock(path: Path, taken: str, **options: Any) -> FileLock:
    """Returns a lock that this process has from now on; the system releases it when it dies.

    On a network file system the lock holds as far as the file system supports `flock`.

    Args:
        path: The file of the lock.
        taken: What the error says if another process has it.
        options: Further arguments of `FileLock`: `mode`, or `timeout`, the seconds that another
            process has to release it.

    Raises:
        ConfigError: Another process has it, or the file cannot be written.
    """
    file = FileLock(path, **{"timeout": 0, **options})
    with writing(path):
        try:
            file.acquire()
        except Timeout as error:
            raise ConfigError(taken) from error
    return file


@contextmanager
def locked(path: Path, taken: str, **options: Any) -> Iterator[None]:
    """Has a lock inside; `lock` explains the arguments."""
    file = lock(path, taken, **options)
    try:
        yield
    finally:
        file.release()


# ---- writing ------------------------------------------------------------------------------------


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError from writing a file of a run into a ConfigError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path}: the file cannot be written ({reason})") from error


@contextmanager
def replaced(path: Path) -> Iterator[io.BufferedWriter]:
    """Opens a new file that takes the place of `path` when the block ends without an error."""
    with writing(path), files.new_content(path) as file:
        yield file


def create_secret(path: Path, text: str) -> None:
    """Writes a new file that only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def append(path: Path, content: bytes) -> None:
    """Adds bytes to a file; if they do not fit on the disk, the file is what it was."""
    with writing(path), path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            write_all(file, content)
        except OSError:
            file.truncate(size)
            raise


def write_all(file: io.FileIO, content: bytes) -> None:
    """Writes all bytes to a file without a buffer, which may take several calls."""
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def make_folder(folder: Path, key: str = "trainer.default_root_dir") -> None:
    """Creates a folder that `key` chose, or removes what killed processes have left in it."""
    with run_folder_errors(folder, key):
        folder.mkdir(parents=True, exist_ok=True)
        files.remove_parts(folder)


def write(path: Path, content: bytes | str) -> None:
    """Writes a file as a whole: a run that is killed leaves no partial file."""
    if isinstance(content, str):
        content = content.encode()
    with replaced(path) as file:
        file.write(content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file as a whole; a function or a class, such as a tokenizer, by its name."""
    write(path, json.dumps(content, indent=2, default=_plain) + "\n")


def _plain(value: Any) -> float | str:
    """Returns a value that JSON does not know as a number, or as the dotted name that it has."""
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return float(value)


def write_csv(path: Path, blocks: Iterable[dict[str, np.ndarray]]) -> None:
    """Writes blocks of columns below each other as a whole, with the names in the first row."""
    with replaced(path) as file:
        for number, block in enumerate(blocks):
            file.writelines(csv_pieces(block, heading=number == 0))


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes records as CSV, a column for each name that some record has; empty for None."""
    names = list(dict.fromkeys(name for record in records for name in record))
    write(path, csv_lines([names, *([record.get(name) for name in names] for record in records)]))


def read_records(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV file, by the names of its columns."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_figure(path: Path, figure: Any) -> None:
    """Draws a figure of matplotlib into a file as a whole; equal figures give equal files."""
    kind = path.suffix[1:]
    metadata = None
    if kind == "pdf":
        metadata = {"CreationDate": None}
    with replaced(path) as file:
        figure.savefig(file, dpi=150, format=kind, metadata=metadata)


def append_csv(path: Path, columns: dict[str, np.ndarray]) -> None:
    """Adds rows to a CSV file, or begins the file with the names of the columns."""
    append(path, b"".join(csv_pieces(columns, heading=not path.exists())))


def csv_pieces(columns: dict[str, np.ndarray], heading: bool) -> Iterator[bytes]:
    """Yields the lines of columns [rows] as CSV, block by block."""
    if heading:
        yield csv_lines([list(columns)])
    rows = max((len(column) for column in columns.values()), default=0)
    for begin in range(0, rows, CSV_ROWS):
        block = slice(begin, begin + CSV_ROWS)
        yield _block_lines([column[block] for column in columns.values()])


def _block_lines(columns: Sequence[np.ndarray]) -> bytes:
    """Returns what `csv_lines` returns of these rows; faster by far if all of them are numbers."""
    if not all(column.dtype.kind in "iuf" and column.ndim == 1 for column in columns):
        return csv_lines(zip(*(column.tolist() for column in columns), strict=True))
    words = [_number_words(column) for column in columns]
    return "".join(f"{line}\r\n" for line in map(",".join, zip(*words, strict=True))).encode()


def _number_words(column: np.ndarray) -> list[str]:
    """Returns numbers as Python writes them; of small counts, each one is written once."""
    if column.dtype.kind == "f":
        return list(map(repr, column.tolist()))
    if column.min(initial=0) >= 0 and column.max(initial=0) < CSV_ROWS:
        counts = np.array([str(count) for count in range(column.max(initial=0) + 1)], object)
        return counts[column].tolist()
    return list(map(str, column.tolist()))


def csv_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    """Returns rows of values as CSV; an apostrophe makes formulas of spreadsheet programs text."""

    def plain(value: Any) -> Any:
        if not isinstance(value, str) or SIGNED.fullmatch(value):
            return value
        if value.startswith(("=", "+", "-", "@", "\t", "\r")):
            return f"'{value}"
        return value

    text = io.StringIO(newline="")
    csv.writer(text).writerows(map(plain, row) for row in rows)
    return text.getvalue().encode()


# ---- reading ------------------------------------------------------------------------------------


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns the errors of reading a damaged file or folder of a run into a ConfigError."""
    try:
        yield
    except ConfigError as error:
        line = str(error)
        if not line.startswith(f"{path}:"):
            line = f"{path}: {line}"
        raise ConfigError(line) from error
    except DAMAGE as error:
        line = " ".join(str(error).split())[:80] or type(error).__name__
        raise ConfigError(
            f"{path}: it is damaged ({line}); restore it, or leave its run out"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Returns the mapping in a JSON file; empty if there is no file."""
    with reading(path):
        if not path.is_file():
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it must be a mapping")
        return content


def read_value(key: str, path: str) -> Any:
    """Returns the content of a JSON file of the user, which the argument `key` names.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except UNREADABLE as error:
        raise ConfigError(f"{key}: {path} cannot be read as JSON: {error}") from error


def last_round(path: Path) -> dict[str, np.ndarray]:
    """Returns the columns, float64 without the round, of the last round's rows in a table."""
    if not path.is_file():
        return {}
    rows: list[list[str]] = []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        names = next(reader)
        for _, group in itertools.groupby(reader, key=lambda row: row[0]):
            rows = list(group)
    values = np.array(rows, np.float64).T
    return {k: v for k, v in zip(names, values, strict=False) if k != "round"}


# ---- files that travel with a checkpoint --------------------------------------------------------


def content(path: Path) -> Tensor:
    """Returns a file's bytes, uint8, mapped into memory, for a checkpoint."""
    size = path.stat().st_size
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def restore(path: Path, saved: Tensor, skip: int = 0) -> bool:
    """Gives a file its content in a checkpoint; returns whether it began with this content.

    It does if it was not changed, apart from `skip` bytes of a header that grows with the file.
    """
    begins = False
    if path.is_file():
        with path.open("rb") as file:
            file.seek(skip)
            parts = saved[skip:].split(PIECE)
            begins = all(file.read(len(part)) == part.numpy().tobytes() for part in parts)
    with replaced(path) as file:
        file.writelines(part.numpy().tobytes() for part in saved.split(PIECE))
    return begins
