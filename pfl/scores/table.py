"""Every client's scores in every evaluation of a run, as one table that NumPy and pandas read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pfl import files
from pfl.datamodules.errors import require_value
from pfl.errors import ConfigError
from pfl.scores.distribution import distribution
from pfl.scores.names import Directions, ScoreName, direction

CLIENTS = "client_scores.npy"  # grows with the evaluations of a run
LOCAL = "local_scores.npy"  # the local baseline in the rounds that are compared with it
MOST_CLIENTS = 10_000  # of a run whose scores of single clients are kept for every evaluation
PLACE = ("round", "client", "percentile")  # columns that are no scores
_ScoresByName = Mapping[ScoreName, np.ndarray] | Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ScoreTable:
    """The scores of M clients in the E evaluations of a run, a row for each client and evaluation.

    The file is a structured array of NumPy, which `pandas.DataFrame(np.load(path))` reads: `round`,
    `client` and a float32 for each score, called like `test/personalized/accuracy`. It is NaN for a
    client without samples, or where a metric is not defined. Of more than 10,000 clients the file
    has the percentiles 0 to 100 of each score, in rows with a `percentile` in place of a `client`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> loss = ScoreName("test", "global", "loss")
        >>> with TemporaryDirectory() as folder:
        ...     append_scores(Path(folder) / CLIENTS, 1, {loss: np.array([0.5, 0.25])})
        ...     append_scores(Path(folder) / CLIENTS, 2, {loss: np.array([0.25, 0.125])})
        ...     scores = ScoreTable.read(folder)
        >>> scores.of(2, loss).tolist()
        [0.25, 0.125]
        >>> scores.over_rounds(loss)["worst10"].tolist()
        [0.5, 0.25]
    """

    rows: np.ndarray

    @classmethod
    def read(cls, folder: str | Path, file: str = CLIENTS) -> ScoreTable | None:
        """Returns the table `CLIENTS` or `LOCAL` of the run in a folder; None if it has none.

        Raises:
            ConfigError: The file is damaged, or the run is of version 0.1.
        """
        path = Path(folder) / file
        if path.with_suffix(".json").is_file():
            raise ConfigError(
                f"{folder}: its scores have the format of version 0.1, which this version does not "
                f"read; run it again, or read it with version 0.1"
            )
        with files.reading(path):
            if not path.is_file():
                return None
            with path.open("rb") as stream:
                count, kind = _read_header(stream)
                rows = np.fromfile(stream, kind, count)
            return cls(rows[: len(rows) - len(rows) % _clients_in(rows)] if len(rows) else rows)

    @classmethod
    def from_rounds(cls, scores: Mapping[int, _ScoresByName]) -> ScoreTable:
        """Returns the table of the scores [M] after some rounds, in the order of the rounds."""
        return cls(np.concatenate([_rows(number, scores[number]) for number in sorted(scores)]))

    @property
    def names(self) -> list[ScoreName]:
        """The scores."""
        columns = self.rows.dtype.names or ()
        return [ScoreName.of(text) for text in columns if text not in PLACE]

    @property
    def percentiles(self) -> bool:
        """Whether the rows are percentiles instead of clients."""
        return "percentile" in (self.rows.dtype.names or ())

    @property
    def rounds(self) -> np.ndarray:
        """The round of each evaluation, [E]."""
        if len(self.rows):
            return self.rows["round"][:: _clients_in(self.rows)]
        return np.empty(0, int)

    def values(self, name: ScoreName | str) -> np.ndarray:
        """Returns a score of all evaluations, float32 [E, M]."""
        return self.rows[str(name)].reshape(len(self.rounds), -1)

    def of(self, round_index: int, name: ScoreName | str) -> np.ndarray | None:
        """Returns the clients' scores [M] after a round (from 1); None if there are none."""
        places = np.flatnonzero(self.rounds == round_index)
        if self.percentiles or str(name) not in map(str, self.names) or not len(places):
            return None
        return self.values(name)[places[-1]]

    def over_rounds(
        self, name: ScoreName | str, metrics: Directions | None = None
    ) -> dict[str, np.ndarray]:
        """Returns how a score is distributed over clients, [E] for each number of `distribution`.

        A number that is not defined is NaN. Where the table has percentiles in place of clients,
        all numbers but the quantiles are computed as if 101 clients had these values.

        Raises:
            ConfigError: There is no such score.
        """
        known = [*map(str, self.names)]
        require_value(
            "client_scores.name", str(name), str(name) in known, f"one of {', '.join(known)}"
        )
        rows = [distribution(values, direction(name, metrics)) for values in self.values(name)]
        names = dict.fromkeys(key for row in rows for key in row)
        return {key: np.array([row.get(key, math.nan) for row in rows]) for key in names}


def append_scores(path: Path, round_index: int, scores: _ScoresByName) -> None:
    """Adds the scores [M] of an evaluation after a round (from 1) to a table.

    A score that the first evaluation did not have is left out, since all rows are alike. The header
    counts the rows, and is written after them: rows of a process that is killed do not count.
    """
    if not scores:
        return
    rows = _rows(round_index, scores)
    if not path.is_file():
        write_scores(path, rows)
        return
    with files.writing(path), path.open("r+b", buffering=0) as file:
        count, kind = _read_header(file)
        end = file.tell() + count * kind.itemsize
        added = np.empty(len(rows), kind)
        for name in kind.names or ():
            if name in (rows.dtype.names or ()):
                added[name] = rows[name]
            else:
                added[name] = np.nan
        file.truncate(end)
        try:
            file.seek(end)
            files.write_all(file, added.tobytes())
        except OSError:
            file.truncate(end)
            raise
        file.seek(0)
        _write_header(file, count + len(added), kind)


def write_scores(path: Path, rows: np.ndarray) -> None:
    """Writes a table as a whole."""
    with files.replaced(path) as file:
        _write_header(file, len(rows), rows.dtype)
        file.write(rows.tobytes())


def header_size(content: bytes) -> int:
    """Returns how many bytes of a table's content come before its rows."""
    return 12 + int.from_bytes(content[8:12], "little")


def _rows(round_index: int, scores: _ScoresByName) -> np.ndarray:
    """Returns the rows of an evaluation, which are percentiles if there are many clients."""
    count = len(next(iter(scores.values())))
    named = {str(name): values for name, values in scores.items()}
    who = "client"
    if count > MOST_CLIENTS:
        who = "percentile"
        named = {name: _percentiles(values) for name, values in named.items()}
        count = 101
    kind = [("round", "<i4"), (who, "<i4"), *((name, "<f4") for name in named)]
    rows = np.empty(count, kind)
    rows["round"] = round_index
    rows[who] = np.arange(count)
    for name, values in named.items():
        with np.errstate(over="ignore"):  # a model that diverged in float64
            rows[name] = values
    return rows


def _percentiles(values: np.ndarray) -> np.ndarray:
    values = values[~np.isnan(values)]
    if len(values):
        return np.percentile(values, np.arange(101))
    return np.full(101, np.nan)


def _clients_in(rows: np.ndarray) -> int:
    """Returns the number of rows of an evaluation, M."""
    return int((rows["round"] == rows["round"][0]).sum())


def _read_header(file: BinaryIO | Any) -> tuple[int, np.dtype]:
    """Returns the number of rows and their dtype, and leaves the file at the first row."""
    if np.lib.format.read_magic(file) != (2, 0):
        raise ConfigError("not written by this program")
    (count,), _, kind = np.lib.format.read_array_header_2_0(file)
    return count, kind


def _write_header(file: BinaryIO | Any, count: int, kind: np.dtype) -> None:
    """Writes a header, which NumPy pads so that its size does not depend on the count."""
    descr = np.lib.format.dtype_to_descr(kind)
    content = {"descr": descr, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_2_0(file, content)
