"""What a run has done so far: the counts that every row of metrics and every checkpoint has."""

from __future__ import annotations

from typing import Any

import numpy as np

from pfl.communication import Ledger


class Progress:
    """The counts of a run.

    Attributes:
        rounds: Number of rounds that are over.
        samples: Number of sample gradients so far.
        bytes_down: Bytes that the server has sent so far.
        bytes_up: Bytes that the server has received so far.
        trained: How many clients of the round that runs have trained in this process.
        to_train: How many of them are to train in this process.
        participants: How many clients' messages arrived in the last round, as the server may know
            it.
        participant_ids: The ids of these clients, ascending int64.
        ledger: Every client's bytes; of no client before a run has begun.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.samples = 0.0
        self.bytes_down = 0
        self.bytes_up = 0
        self.trained = 0
        self.to_train = 0
        self.participants = 0
        self.participant_ids = np.empty(0, np.int64)
        self.ledger = Ledger(0)

    def begin(self, num_clients: int) -> None:
        """Counts no bytes so far, of a population of M clients."""
        self.ledger = Ledger(num_clients)
        self.bytes_down = 0
        self.bytes_up = 0

    def note_participants(self, participants: int, ids: np.ndarray) -> None:
        """Notes whose messages have arrived in the round that runs."""
        self.participants = participants
        self.participant_ids = ids

    def end_round(self, samples: float, down: int, up: int) -> None:
        """Adds a round with its sample gradients and bytes."""
        self.rounds += 1
        self.samples += samples
        self.bytes_down += down
        self.bytes_up += up

    def go_on_from(self, rounds: int) -> None:
        """Takes a number of rounds as over."""
        self.rounds = rounds

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts but the ledger, as plain values."""
        return {
            "rounds": self.rounds,
            "samples_seen": self.samples,
            "bytes": [self.bytes_down, self.bytes_up],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes over what `state_dict` has returned."""
        self.rounds = saved["rounds"]
        self.samples = saved["samples_seen"]
        self.bytes_down, self.bytes_up = saved["bytes"]
