"""Every client's scores in every evaluation of a run, in one compact file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pfl import files
from pfl.errors import require_one_of
from pfl.report.distribution import direction, distribution

NAME = "client_scores"  # .bin has the numbers, .json what they are
FILES = (f"{NAME}.json", f"{NAME}.bin")
MOST_CLIENTS = 10_000  # of a run whose scores of single clients are kept for every evaluation


@dataclass(frozen=True)
class ClientScoresByRound:
    """The scores of M clients in the E evaluations of a run.

    The file `client_scores.bin` has a record for each evaluation: the round (int64), then a
    float32 for each column and client, both little-endian. `client_scores.json` names the columns.
    Of more than 10,000 clients the file has the percentiles 0 to 100 of each column, M = 101.

    Attributes:
        rounds: The round of each evaluation, int64 [E].
        columns: The names of the columns, such as `test_personalized_accuracy`.
        values: float32 [E, columns, M]; NaN for a client without samples, or where a metric is not
            defined.
        metrics: For each metric beside accuracy and loss whether large values are good; None if
            that is not known.
        percentiles: Whether the values are percentiles instead of clients.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder)
        ...     append(path, 1, {"test_global_loss": np.array([0.5, 0.25])})
        ...     append(path, 2, {"test_global_loss": np.array([0.25, 0.125])})
        ...     scores = ClientScoresByRound.read(path)
        >>> scores.of(2, "test_global_loss").tolist()
        [0.25, 0.125]
        >>> scores.over_rounds("test_global_loss")["worst10"].tolist()
        [0.5, 0.25]
    """

    rounds: np.ndarray
    columns: list[str]
    values: np.ndarray
    metrics: dict[str, bool | None] = field(default_factory=dict)
    percentiles: bool = False

    @classmethod
    def read(cls, folder: str | Path) -> ClientScoresByRound | None:
        """Returns the scores of the run in a folder; None if it has none."""
        heading = _heading(Path(folder))
        if heading is None:
            return None
        kind = _record(heading["columns"], heading["clients"])
        records = _whole_records(Path(folder), kind)
        return cls(
            records["round"],
            heading["columns"],
            records["scores"],
            heading.get("metrics", {}),
            heading.get("percentiles", False),
        )

    def of(self, round_index: int, column: str) -> np.ndarray | None:
        """Returns the clients' scores [M] after a round (from 1); None if there are none."""
        places = np.flatnonzero(self.rounds == round_index)
        if self.percentiles or column not in self.columns or not len(places):
            return None
        return self.values[places[-1], self.columns.index(column)]

    def over_rounds(self, column: str) -> dict[str, np.ndarray]:
        """Returns how a column is distributed over clients, evaluation by evaluation.

        Args:
            column: One of the columns.

        Returns:
            The numbers of `pfl.report.distribution`, [E] each, such as `q50` and `worst10`; NaN
            where a number is not defined. Of percentiles, the numbers other than quantiles are
            those of 101 clients with these values.

        Raises:
            ConfigError: There is no such column.
        """
        require_one_of("client_scores.column", column, *self.columns)
        better = direction(column, self.metrics)
        scores = self.values[:, self.columns.index(column)]
        rows = [distribution(values, better) for values in scores]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}


def append(
    folder: Path,
    round_index: int,
    scores: Mapping[str, np.ndarray],
    metrics: Mapping[str, bool | None] | None = None,
) -> None:
    """Adds the scores [M] of an evaluation after a round (from 1), by column.

    Columns that the first evaluation did not have are left out, since all records are alike.

    Args:
        folder: The folder of the run.
        round_index: The round.
        scores: The scores.
        metrics: For each metric beside accuracy and loss whether large values are good.
    """
    if not scores:
        return
    heading, clients = _heading(folder), len(next(iter(scores.values())))
    percentiles = clients > MOST_CLIENTS
    if percentiles:
        scores, clients = {name: _percentiles(values) for name, values in scores.items()}, 101
    if heading is None:
        heading = {"columns": list(scores), "clients": clients, "percentiles": percentiles}
        heading["metrics"] = dict(metrics or {})
        files.write_json(folder / f"{NAME}.json", heading)
    record = np.zeros((), _record(heading["columns"], heading["clients"]))
    record["round"], record["scores"] = round_index, np.nan
    for number, column in enumerate(heading["columns"]):
        if column in scores:
            record["scores"][number] = scores[column]
    files.append(folder / f"{NAME}.bin", record.tobytes())


def _percentiles(values: np.ndarray) -> np.ndarray:
    values = values[~np.isnan(values)]
    return np.percentile(values, np.arange(101)) if len(values) else np.full(101, np.nan)


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
