"""Readers and writers of the CSV and JSON files in a run's folder."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pfl.errors import ConfigError

CSV_ROWS = 1 << 12  # rows that are Python numbers at a time: a million would take hundreds of MB


@contextmanager
def run_folder_errors(folder: Path, key: str = "trainer.default_root_dir") -> Iterator[None]:
    """Turns an OSError from creating a folder into a one-line error.

    Args:
        folder: The folder that is created in the block.
        key: The key of the configuration that chose the folder.

    Raises:
        ConfigError: If the block raises an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{key}: there can be no folder {folder}: {error.strerror}") from error


def append(path: Path, round_index: int, columns: dict[str, np.ndarray]) -> None:
    """Adds a round's rows to a table, whose first row is the names of the columns."""
    if columns:
        rounds = np.full(len(next(iter(columns.values()))), round_index)
        write_csv(path, {"round": rounds, **columns}, append=path.exists())


def cut(path: Path, rounds: int) -> None:
    """Removes the rows after a number of rounds, since a resumed run writes them again."""
    if path.exists():
        head, *rows = path.read_bytes().splitlines(keepends=True)
        kept = [r for r in rows if r.endswith(b"\n") and int(r.split(b",", 1)[0]) <= rounds]
        path.write_bytes(b"".join([head, *kept]))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file as a whole: a run that is killed leaves no partial file."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2, default=float) + "\n")
    os.replace(part, path)


def write_csv(path: Path, columns: dict[str, np.ndarray], append: bool = False) -> None:
    """Writes columns, with their names in the first row, or adds rows to such a file."""
    with path.open("a" if append else "w", newline="") as file:
        writer = csv.writer(file)
        if not append:
            writer.writerow(columns)
        rows = max((len(column) for column in columns.values()), default=0)
        for begin in range(0, rows, CSV_ROWS):
            block = slice(begin, begin + CSV_ROWS)
            parts = (column[block].tolist() for column in columns.values())
            writer.writerows(zip(*parts, strict=True))
