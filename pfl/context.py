"""What is known of a run before it begins: plain facts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


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
