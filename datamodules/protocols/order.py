"""Splits of every client's own samples in the order of a column, such as their time."""

import datetime
import re
from collections.abc import Mapping

import numpy as np

from ..errors import RowError, require_value
from ..partitions.index_arrays import IndexArrays, Ragged
from .splits import part_sizes


def split_in_order(
    owned: IndexArrays, order: np.ndarray, shares: tuple[float, ...]
) -> list[IndexArrays]:
    """Splits every client's samples into parts: the last in order, those before them, the rest.

    Samples with equal values stand in the order of their indices. The parts are ascending for every
    client.

    Args:
        owned: The samples of each client.
        order: A value of each sample that can be sorted, [N].
        shares: The share of each part but the rest, 0 to 1; see `Protocol` for the rounding.
    """
    sizes = part_sizes(owned.sizes, shares)
    parts: list[list[np.ndarray]] = [[] for _ in sizes]
    for client in range(len(owned)):
        samples = np.sort(owned[client])
        # Latest first; a stable sort of the reversed samples keeps equal values reversed, too.
        latest = samples[np.argsort(order[samples], kind="stable")][::-1]
        ends = np.cumsum(sizes[:, client])
        for number, end in enumerate(ends):
            begin = end - sizes[number, client]
            parts[number].append(np.sort(latest[begin:end]))
    empty = np.empty(0, np.int64)
    return [
        Ragged.from_sizes(np.concatenate([empty, *arrays]), held)
        for arrays, held in zip(parts, sizes, strict=True)
    ]


def order_of(name: str, columns: Mapping[str, np.ndarray] | None, num_samples: int) -> np.ndarray:
    """Returns a column as values that can be sorted, [num_samples]: numbers, or points in time."""
    key = "SplitOwn.order"
    known = columns or {}
    expected = "a column of the data"
    if known:
        expected = f"one of the columns, which are {', '.join(known)}"
    require_value(key, name, name in known, expected)
    values = np.asarray(known[name])
    number = len(values)
    expected = f"a column with a value for each of {num_samples} samples, and it has {number}"
    require_value(key, name, number >= num_samples, expected)
    return sortable(key, name, values)


def sortable(key: str, name: str, values: np.ndarray) -> np.ndarray:
    """Returns numbers and dates as they are, and the text of dates, ISO 8601, as points in time.

    Text is never sorted as text: 10 would come before 9, and 01/02/2024 is read in two ways.

    Raises:
        ConfigError: A value is missing, or is no number and no date.
    """
    if values.dtype.kind in "biuM":
        return values
    if values.dtype.kind == "f":
        finite = bool(np.isfinite(values).all())
        expected = "a column without missing or infinite values"
        require_value(key, name, finite, expected)
        return values
    cells = values.tolist()
    for row, cell in enumerate(cells, 1):
        if cell is None or cell != cell or cell == "":
            raise RowError(
                f"{key}: the column {name!r} has no value; it must have one in each row",
                row,
            )
    if all(isinstance(cell, int | float) for cell in cells):
        return np.array(cells)
    if _is_number(cells[0]):  # then a text is wrong, and not the numbers before it
        for row, cell in enumerate(cells, 1):
            if not _is_number(cell):
                _time(key, name, row, cell)
    return np.array([_time(key, name, row, cell) for row, cell in enumerate(cells, 1)])


def _is_number(cell: object) -> bool:
    try:
        float(str(cell))
    except ValueError:
        return False
    return True


def _time(key: str, name: str, row: int, cell: object) -> np.datetime64:
    """Returns a date, or the text of one, as a point in time; those with a zone in UTC."""
    time = cell
    try:
        if isinstance(cell, str):
            # Python 3.10 does not read the Z of UTC.
            time = datetime.datetime.fromisoformat(re.sub("Z$", "+00:00", cell.strip()))
        if isinstance(time, datetime.datetime) and time.tzinfo is not None:
            time = time.astimezone(datetime.timezone.utc).replace(tzinfo=None)
        if not isinstance(time, datetime.date):  # a `datetime` is a `date`, too
            raise ValueError
    except ValueError:
        raise RowError(
            f"{key}: the column {name!r} holds {cell!r}; it must hold numbers, or dates written as "
            "2024-01-31 or 2024-01-31T18:30",
            row,
        ) from None
    return np.datetime64(time, "us")
