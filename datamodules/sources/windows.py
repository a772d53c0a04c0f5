"""Windows of a series: the rows that come before a target."""

import numpy as np

from ..errors import ConfigError


def windows(
    series: np.ndarray, order: np.ndarray | None, window: int, horizon: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of each window and the row of its target, ascending.

    A target is `horizon` rows after the last row of its window, in the same series. The window
    holds no later row, nor the target's unless `horizon` is 0. A series with too few rows has no
    window.

    Args:
        series: The series of each row, such as its client, [N].
        order: A value of each row by which its series is sorted, [N]; None keeps the order.
        window: The rows of a window, W.
        horizon: The rows from the end of a window to its target; 0 makes its last row the target.

    Returns:
        rows: int64 [n, W], ascending in time.
        targets: int64 [n].

    Raises:
        ConfigError: Two rows of a series have the same place in the order.
    """
    names, number = np.unique(series.astype(str), return_inverse=True)
    found_rows = [np.empty((0, window), np.int64)]
    found_targets = [np.empty(0, np.int64)]
    for one, name in enumerate(names):
        rows = np.flatnonzero(number == one)
        if order is not None:
            rows = rows[np.argsort(order[rows], kind="stable")]
            same = np.flatnonzero(order[rows][1:] == order[rows][:-1])
            if len(same):
                first = rows[same[0]] + 1
                second = rows[same[0] + 1] + 1
                raise ConfigError(
                    f"TableDataModule.order_column: the rows {first} and {second} after the names, "
                    f"of the client {str(name)!r}, are both at {order[rows[same[0]]]}; the rows of "
                    "a client must differ in it"
                )
        last = len(rows) - horizon  # windows end before this place
        ends = np.arange(window - 1, last)
        if not len(ends):
            continue
        places = ends[:, None] + np.arange(1 - window, 1)
        found_rows.append(rows[places])
        found_targets.append(rows[ends + horizon])
    targets = np.concatenate(found_targets)
    by_row = np.argsort(targets, kind="stable")
    return np.concatenate(found_rows)[by_row], targets[by_row]
