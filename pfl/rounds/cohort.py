"""The clients of one round, as one process sees them."""

from __future__ import annotations

import numpy as np

from pfl.clients import ClientData


class Cohort:
    """The clients of one round, as one process sees them: one Lightning batch.

    It is no dataclass, since Lightning looks for tensors within the fields of those.

    Args:
        round_index: The round, from 0.
        ids: The clients of all processes, ascending int64.
        chunks: The clients that train in this process, largest first, in chunks that fit into
            memory; a process without clients has one empty chunk.
        data: The samples of all clients.
        seconds: When the round ends, in virtual seconds (`loop.clock`); None: no time is counted.
        may_fail: Whether clients of the run may fail (`loop.dropout`).
    """

    def __init__(
        self,
        round_index: int,
        ids: np.ndarray,
        chunks: list[np.ndarray],
        data: ClientData,
        seconds: float | None = None,
        may_fail: bool = False,
    ) -> None:
        self.round = round_index
        self.ids = ids
        self.chunks = chunks
        self.data = data
        self.seconds = seconds
        self.may_fail = may_fail
