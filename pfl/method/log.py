"""What a method's code logs in the round that runs in this thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor


@dataclass
class Log:
    """What a method's code has logged for the round's row and tables.

    Attributes:
        losses: By name, losses [A] of a batch's rows and the rows' numbers of samples.
        tables: By name, chunks of rows as arrays by column.
        taken: Numbers of sample gradients, one for each call of the oracle.
    """

    losses: dict[str, list[tuple[Tensor, list[int]]]] = field(default_factory=dict)
    tables: dict[str, list[dict[str, np.ndarray]]] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)

    def extend(self, other: Log) -> None:
        """Adds what another log has."""
        for name, losses in other.losses.items():
            self.losses.setdefault(name, []).extend(losses)
        for name, rows in other.tables.items():
            self.tables.setdefault(name, []).extend(rows)
        self.taken.extend(other.taken)

    @property
    def gradients(self) -> int:
        """Number of sample gradients that the oracle took."""
        return sum(self.taken)


class _Here(threading.local):
    log: Log | None = None


_here = _Here()


@contextmanager
def logging_to(log: Log | None) -> Iterator[None]:
    """Makes what this thread logs inside go to `log`, or nowhere for None."""
    before = _here.log
    _here.log = log
    try:
        yield
    finally:
        _here.log = before


def current_log() -> Log | None:
    """Returns the log of this thread; None outside of `logging_to`."""
    return _here.log


def count_gradients(count: int) -> None:
    """Adds sample gradients to the log of this thread, if it has one; the oracle calls it."""
    if _here.log is not None:
        _here.log.taken.append(count)
