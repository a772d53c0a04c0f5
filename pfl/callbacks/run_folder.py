"""The folder of a run: its lock, and the tables in it that grow round by round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import BaseFileLock
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl import files
from pfl.scores import table
from pfl.scores.runs import Row, column_names


class RunFolder:
    """A run's folder, into which only one process at a time may write, if this one `writes`."""

    def __init__(self, path: Path = Path(), writes: bool = True) -> None:
        self.path = path
        self.writes = writes
        self._lock: BaseFileLock | None = None
        self._columns: list[str] = []  # columns of metrics.csv
        self._rounds = 0  # rounds in the method's tables

    def lock(self) -> None:
        """Creates and locks the folder, and removes what a killed process has left half written."""
        if self.writes:
            files.make_folder(self.path)
            self._lock = files.lock(
                self.path / ".lock",
                f"ckpt_path: another process is writing to {self.path}; wait until it has ended, "
                f"or end it",
            )
            for folder in (self.path, self.path / "checkpoints"):
                for path in folder.glob("*.part"):
                    path.unlink(missing_ok=True)

    def unlock(self) -> None:
        """Lets other processes write into the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # ---- tables -------------------------------------------------------------------------------

    def begin(
        self, rows: Sequence[Row], saved: Mapping[str, Tensor] | None, tables: Sequence[str]
    ) -> None:
        """Gives all tables the rows of the checkpoint, or removes the rows of another run.

        Args:
            rows: The rows of `metrics.csv` so far.
            saved: The content of the other tables in the checkpoint; None: there is none.
            tables: The tables of the method, without their ending.
        """
        self._columns = []
        self._rounds = len(rows)
        if not self.writes:
            return
        # Without saved tables the same objects are fitted again, and have written these files.
        if not rows or saved is not None:
            for name in self._growing(tables):
                path = self.path / name
                content = (saved or {}).get(name)
                if content is None:
                    path.unlink(missing_ok=True)
                    continue
                begin = content[:12].numpy().tobytes()
                if path.suffix == ".npy":
                    skip = table.header_size(begin)
                else:
                    skip = 0
                if not files.restore(path, content, skip):
                    self._warn_restored(name, len(rows))
            if rows and not self._metrics_begin_with(rows):
                self._warn_restored("metrics.csv", len(rows))
        if rows:
            self._rewrite_metrics(rows)
        else:
            (self.path / table.LOCAL).unlink(missing_ok=True)

    def _growing(self, tables: Sequence[str]) -> list[str]:
        """Returns the files, apart from `metrics.csv`, that grow with the rounds."""
        return [*(f"{name}.csv" for name in tables), table.CLIENTS]

    def _metrics_begin_with(self, rows: Sequence[Row]) -> bool:
        """Returns whether `metrics.csv` has the rows of the checkpoint, as it does if unchanged."""
        path = self.path / "metrics.csv"
        if not path.is_file():
            return False
        found = files.read_records(path)
        texts = [{name: str(value) for name, value in row.items()} for row in rows]
        # A checkpoint of a round that has not ended has the round's row before the file has it.
        return len(found) >= len(texts) - 1 and all(
            text.items() <= row.items() for text, row in zip(texts, found, strict=False)
        )

    def _warn_restored(self, name: str, rounds: int) -> None:
        rank_zero_warn(
            f"{self.path / name} was changed or removed since the run wrote it; its rows up to "
            f"round {rounds} are now those of the checkpoint",
            category=UserWarning,
        )

    def add_row(self, rows: Sequence[Row]) -> None:
        """Adds the last of these rows to `metrics.csv`."""
        if not self.writes:
            return
        if rows[-1].keys() - set(self._columns):
            self._rewrite_metrics(rows)
        else:
            line = files.csv_lines([[rows[-1].get(name, "") for name in self._columns]])
            files.append(self.path / "metrics.csv", line)

    def _rewrite_metrics(self, rows: Sequence[Row]) -> None:
        self._columns = column_names(rows)
        files.write_records(self.path / "metrics.csv", rows)

    def add_tables(self, rounds: int, recorded: Mapping[str, dict[str, np.ndarray]]) -> None:
        """Adds what the method has recorded in a round to its tables, unless they have it."""
        if self.writes and self._rounds < rounds:
            for name, columns in recorded.items():
                if columns:
                    numbers = np.full(len(next(iter(columns.values()))), rounds)
                    files.append_csv(self.path / f"{name}.csv", {"round": numbers, **columns})
            self._rounds = rounds

    def content(self, tables: Sequence[str]) -> dict[str, Tensor]:
        """Returns the content of the tables, for a checkpoint."""
        paths = (self.path / name for name in (self._growing(tables) if self.writes else ()))
        return {path.name: files.content(path) for path in paths if path.is_file()}

    def has_result(self, rounds: int) -> bool:
        """Returns whether the folder has the result of a run that ended after these rounds."""
        try:
            text = (self.path / "summary.json").read_text(encoding="utf-8")
            summary: dict[str, Any] = json.loads(text)
        except files.UNREADABLE:
            return False
        written = summary.get("finished") and summary.get("round") == rounds
        return bool(written) and (self.path / "clients.csv").is_file()
