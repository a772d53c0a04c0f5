"""The cells of a CSV file as numbers, as identifiers and as targets."""

import re
from collections.abc import Sequence

import numpy as np

MISSING = {"", "#N/A", "#NA", "-NaN", "-nan", "N/A", "NA", "NULL", "NaN", "n/a", "nan", "null"}

_PLAIN = re.compile(r"0|-?[1-9][0-9]*")
_PLAIN_OR_WITH_ZEROS = re.compile(r"(0|-?[1-9][0-9]*)(\.0*)?")
_WHOLE = re.compile(r"\s*[+-]?\d+\s*")


def values_of(cells: Sequence[str]) -> np.ndarray:
    """Returns whole numbers, else floating ones, else booleans, else the text of the cells.

    Cells such as NA among numbers or booleans are missing, also with spaces around them, as numbers
    may have: None in an array of objects.
    """
    gaps = np.array([cell.strip() in MISSING for cell in cells], bool)
    known = cells
    if gaps.any():
        known = [cell for cell, is_gap in zip(cells, gaps, strict=True) if not is_gap]
    kinds: tuple[type, ...] = (int, float)
    if "_" in "".join(known):  # Python reads 1_0 as the number 10
        kinds = ()
    values: np.ndarray
    for kind in kinds:
        try:
            values = np.fromiter(map(kind, known), kind, len(known))
            break
        except (ValueError, OverflowError):
            pass
    else:
        if not {cell.lower() for cell in known} <= {"true", "false"}:
            return np.array(cells, object)
        values = np.array([cell.lower() == "true" for cell in known])
    if not gaps.any():
        return values
    column = np.full(len(cells), None, object)
    column[~gaps] = values
    return column


def identifiers_of(cells: Sequence[str]) -> np.ndarray:
    """Returns the identifiers that stand in cells: whole numbers if all are plain, else the text.

    A whole number is plain if it is written with the digits 0 to 9 alone, without zeros before it,
    with or without a minus, and fits into 64 bits. If all cells of a column are plain, they are
    numbers, and stand in the order of numbers: 7, 12. Otherwise they are the text of the file, in
    the order of text: 007, 07 and 7 are three identifiers, as are 1e2, 100 and 100.0.

    Missing values are those of `values_of`.
    """
    values = values_of(cells)
    if values.dtype.kind == "i" and all(map(_PLAIN.fullmatch, cells)):
        return values
    texts = np.array(cells, object)
    if values.dtype.kind == "O":
        texts[[value is None for value in values]] = None
    return texts


def targets_of(cells: Sequence[str]) -> np.ndarray:
    """Returns floating numbers if one of the numbers has a point or an exponent, else classes.

    The names of classes are booleans, or what `identifiers_of` returns.
    """
    values = values_of(cells)
    if values.dtype.kind == "b":
        return values
    if values.dtype.kind == "f" and not all(map(_WHOLE.fullmatch, cells)):
        return values
    return identifiers_of(cells)


def classes_of(cells: Sequence[str]) -> np.ndarray:
    """Returns the names of classes; where all cells are written as 2 or 2.0, they are numbers.

    Pandas writes whole numbers as 2.0 where a value was missing. Other floating numbers are text.
    """
    if all(map(_PLAIN_OR_WITH_ZEROS.fullmatch, cells)):
        return identifiers_of([cell.partition(".")[0] for cell in cells])
    values = values_of(cells)
    if values.dtype.kind == "b":
        return values
    return identifiers_of(cells)


def is_number(value: object) -> bool:
    """Returns whether a cell holds a number, or the text of one."""
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return "_" not in str(value)  # see `values_of`
