"""What travels between server and clients, and the ledger that counts it in bytes.

Only payload is counted: values, and the indices or bit masks without which a sparse message cannot
be read. Headers of a few bytes a message are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pfl.parameters import ParameterSpace


@dataclass
class Message:
    """Values as the receiver reads them, and what they cost on the wire.

    Attributes:
        values: [K] from the server to everyone, or [C, K] from C clients.
        nbytes: Bytes of one message, or int64 [C] where the clients' messages differ in size.
        weighting: Of the clients in the mean of this message; None: as the method says.
    """

    values: Tensor
    nbytes: int | Tensor
    weighting: Literal["samples", "uniform"] | None = None


def dense(values: Tensor) -> Message:
    """Every value, at its own width."""
    return Message(values, values.shape[-1] * values.element_size())


def low_rank(values: Tensor, space: ParameterSpace, ranks: Tensor) -> Message:
    """Two factors for every matrix layer where they are smaller than the layer itself.

    A layer d1 x d2 of rank r goes as U diag(s)^(1/2) and diag(s)^(1/2) V', that is r (d1 + d2)
    values, or densely as d1 d2 (FedSLR, Section 5). 1-D layers are dense.

    Args:
        values: Flat models [..., P].
        ranks: int64 [..., number of matrix layers].
    """
    return Message(values, low_rank_size(space, ranks) * values.element_size())


def low_rank_size(space: ParameterSpace, ranks: Tensor) -> Tensor:
    """Number of values of `low_rank`: sum_l min(r_l (d1 + d2), d1 d2) + the 1-D layers, int64."""
    pairs = [layer.matrix_shape for layer in space.matrices]
    shapes = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    area = shapes.prod(1)
    factors = torch.minimum(ranks.cpu() * shapes.sum(1), area)
    return factors.sum(-1) + (space.size - int(area.sum()))


def sparse(values: Tensor) -> Message:
    """The non-zero values with 4-byte indices or with a mask of one bit a value, the smaller."""
    count = values.count_nonzero(-1)
    indices, bits = 4 * count, -(-values.shape[-1] // 8)
    return Message(values, count * values.element_size() + indices.clamp_max(bits))


def masked(values: Tensor, mask: Tensor) -> Message:
    """Only the values under a mask (bool [K]) that both sides know: nothing else is sent."""
    return Message(values, int(mask.sum()) * values.element_size())


class Ledger:
    """Counts bytes down and up, for each client and over all rounds; takes room for those it met.

    Args:
        num_clients: The population, M.
    """

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self._places: dict[int, int] = {}
        self._counts = np.zeros((2, 64), np.int64)  # down and up, by place; the others are 0

    @property
    def downlink(self) -> np.ndarray:
        """Bytes that each client has received so far, int64 [M]."""
        return self.of(np.arange(self.num_clients))[0]

    @property
    def uplink(self) -> np.ndarray:
        """Bytes that each client has sent so far, int64 [M]."""
        return self.of(np.arange(self.num_clients))[1]

    def of(self, clients: np.ndarray) -> np.ndarray:
        """Bytes that some clients have received and sent so far, int64 [2, C]."""
        places = [self._places.get(client, -1) for client in clients.tolist()]
        return self._counts[:, places]  # nobody has the last place

    def add(self, clients: np.ndarray, down: int | Tensor, up: int | Tensor) -> tuple[int, int]:
        """Book the messages of some clients, each in bytes; returns the sums down and up."""
        known = self._places
        places = [known.setdefault(client, len(known)) for client in clients.tolist()]
        if (short := len(known) + 1 - self._counts.shape[1]) > 0:
            room = max(short, self._counts.shape[1])  # doubled, so that it is seldom moved
            self._counts = np.pad(self._counts, ((0, 0), (0, room)))
        sums = []
        for booked, count in zip(self._counts, (down, up), strict=True):
            bytes_each = np.broadcast_to(_bytes(count), clients.shape)
            np.add.at(booked, places, bytes_each)
            sums.append(int(bytes_each.sum()))
        return sums[0], sums[1]

    def state_dict(self) -> dict[str, Tensor]:
        """The counts of the clients that have any (`clients`, ascending), as tensors."""
        ids = np.array(sorted(self._places), np.int64)
        counts = self.of(ids)
        some = counts.any(0)
        values = {"clients": ids[some], "downlink": counts[0, some], "uplink": counts[1, some]}
        return {name: torch.from_numpy(value) for name, value in values.items()}

    def load_state_dict(self, *states: dict[str, Tensor]) -> None:
        """The inverse of `state_dict`, or the sum of several."""
        self._places, self._counts = {}, np.zeros_like(self._counts)
        for state in states:
            self.add(state["clients"].numpy(), state["downlink"], state["uplink"])


def _bytes(count: int | Tensor) -> int | np.ndarray:
    return count.cpu().numpy() if isinstance(count, Tensor) else count
