"""What is known of a run before it begins, and what a round is about: plain facts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pfl.clients import ClientData


@dataclass(frozen=True)
class RunContext:
    """The facts of a run that every round and every stage may read.

    Attributes:
        seed: The seed of cohorts, sample orders and all other draws of the experiment.
        population: The ids of the M clients that train, ascending int64 [M].
        sizes: Number of training samples of every client by id, int64.
        rounds: The number of rounds after which the run ends; None: it is not known beforehand.
        device: Where models are.
        rank: The number of this process among `processes`.
        processes: How many processes share the clients.
    """

    seed: int
    population: np.ndarray
    sizes: np.ndarray
    rounds: int | None
    device: torch.device
    rank: int = 0
    processes: int = 1


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
