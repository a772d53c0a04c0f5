"""Every client's scores in every evaluation of a run, in one compact file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pfl import files

NAME = "client_scores"  # .bin has the numbers, .json what they are
FILES = (f"{NAME}.json", f"{NAME}.bin")


@dataclass(frozen=True)
class ClientScoresByRound:
    """The scores of M clients in the E evaluations of a run.

    The file `client_scores.bin` has a record for each evaluation: the round (int64), then a
    float32 for each column and client. `client_scores.json` names the columns.

    Attributes:
        rounds: The round of each evaluation, int64 [E].
        columns: The names of the columns, such as `test_personalized_accuracy`.
        values: float32 [E, columns, M]; NaN for a client without samples.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder)
        ...     append(path, 1, {"test_global_loss": np.array([0.5, 0.25])})
        ...     append(path, 2, {"test_global_loss": np.array([0.25, 0.125])})
        ...     scores = ClientScoresByRound.read(path)
        >>> scores.of(2, "test_global_loss").tolist()
        [0.25, 0.125]
    """

    rounds: np.ndarray
    columns: list[str]
    values: np.ndarray

    @classmethod
    def read(cls, folder: Path) -> ClientScoresByRound | None:
        """Returns the scores of the run in a folder; None if it has none."""
        heading = _heading(folder)
        if heading is None:
            return None
        kind = _record(heading["columns"], heading["clients"])
        records = _whole_records(folder, kind)
        return cls(records["round"], heading["columns"], records["scores"])

    def of(self, round_index: int, column: str) -> np.ndarray | None:
        """Returns the clients' scores [M] after a round (from 1); None if there are none."""
        places = np.flatnonzero(self.rounds == round_index)
        if column not in self.columns or not len(places):
            return None
        return self.values[places[-1], self.columns.index(column)]


def append(folder: Path, round_index: int, scores: Mapping[str, np.ndarray]) -> None:
    """Adds the scores [M] of an evaluation after a round (from 1), by column.

    Columns that the first evaluation did not have are left out, since all records are alike.
    """
    if not scores:
        return
    heading = _heading(folder)
    if heading is None:
        clients = len(next(iter(scores.values())))
        heading = {"columns": list(scores), "clients": clients}
        files.write_json(folder / f"{NAME}.json", heading)
    record = np.zeros((), _record(heading["columns"], heading["clients"]))
    record["round"], record["scores"] = round_index, np.nan
    for number, column in enumerate(heading["columns"]):
        if column in scores:
            record["scores"][number] = scores[column]
    files.append(folder / f"{NAME}.bin", record.tobytes())


def _heading(folder: Path) -> dict | None:
    path = folder / f"{NAME}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _record(columns: list[str], clients: int) -> np.dtype:
    return np.dtype([("round", "<i8"), ("scores", "<f4", (len(columns), clients))])


def _whole_records(folder: Path, kind: np.dtype) -> np.ndarray:
    """Returns all records but one that a killed process has left half written."""
    path = folder / f"{NAME}.bin"
    size = path.stat().st_size if path.exists() else 0
    return np.fromfile(path, kind, size // kind.itemsize) if size else np.empty(0, kind)
