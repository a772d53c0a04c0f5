"""Messages between server and clients, and the ledger that counts their bytes.

Only payload is counted: values, and the indices or bit masks without which a sparse message cannot
be read. Headers of a few bytes a message are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pfl.errors import ConfigError
from pfl.parameters import ParameterSpace


@dataclass
class Message:
    """Values as the receiver reads them, and the number of bytes that are sent.

    Attributes:
        values: [K] from the server to every client, or [C, K] from or to C clients.
        nbytes: Bytes of one message, or int64 [C] if the clients' messages differ in size.
        weighting: The clients' weights in the mean of this message, "samples" or "uniform"; None:
            the method's `weighting`.
        reduce: How the server gets what clients send: "mean", their weighted mean [K]; "rows", the
            messages one by one, [participants, K], in the order of the clients' ids.
        reference: Public values [K] near which the messages of all clients lie, from which
            `loop.privacy` measures them; None: for the message "w" the one that the server has sent
            to everyone under that name, if its shape is the same, and otherwise zero.
        mask: Which of the values are sent, bool [K], where server and clients both know it (see
            `masked`); None: all, or whatever the number of bytes says.
        places: Where in the server's model the values lie, int64 [K], where clients have networks
            of their own (`pfl.models.Family`); None: the message is as wide as the server reads it.
        payload: What travels in place of the values, from which the server computes them: tensors
            [C, n] by name, whose bytes together are `nbytes`. None: the values themselves.

    Example:
        Two clients send a mean that the server weights uniformly, 4 bytes each:

        >>> message = Message(torch.tensor([[1.0], [3.0]]), nbytes=4, weighting="uniform")
        >>> message.values.shape
        torch.Size([2, 1])
    """

    values: Tensor
    nbytes: int | Tensor
    weighting: Literal["samples", "uniform"] | None = None
    reduce: Literal["mean", "rows"] = "mean"
    reference: Tensor | None = None
    mask: Tensor | None = None
    places: Tensor | None = None
    payload: Mapping[str, Tensor] | None = None


ToSend: TypeAlias = Message | Tensor | Mapping[str, Message | Tensor]
"""What a method's hook returns: one message, or messages by name; a tensor is sent as it is."""


def by_name(messages: ToSend) -> dict[str, Message]:
    """Returns messages by name; a single one has the name "w", and a tensor is sent densely."""
    named = messages if isinstance(messages, Mapping) else {"w": messages}
    return {name: m if isinstance(m, Message) else dense(m) for name, m in named.items()}


def dense(values: Tensor, reduce: Literal["mean", "rows"] = "mean") -> Message:
    """Returns a message of all values [..., K], each with the bytes of its dtype.

    `reduce` is that of `Message`.

    Example:
        >>> dense(torch.zeros(5, 10)).nbytes  # of one of five clients: 10 float32 values
        40

    Raises:
        ConfigError: The values are a single number without an axis.
    """
    if values.dim() == 0:
        raise ConfigError(
            "model: dense(values) got a single number, a tensor []; give a message of C clients "
            "the shape [C, K], and one of the server the shape [K]"
        )
    return Message(values, values.shape[-1] * values.element_size(), reduce=reduce)


def header(values: Tensor) -> Message:
    """Returns a message of a few numbers whose bytes, like a header's, are not counted.

    Args:
        values: [K], or a single number, from the server; [C, K] from or to C clients.

    Example:
        >>> header(torch.tensor(0.5)).values, header(torch.tensor(0.5)).nbytes
        (tensor([0.5000]), 0)
        >>> header(torch.zeros(5, 2)).values.shape  # two numbers of each of five clients
        torch.Size([5, 2])
    """
    return Message(torch.atleast_1d(values.detach()).clone(), 0)


def low_rank(values: Tensor, space: ParameterSpace, ranks: Tensor) -> Message:
    """Returns a message with two factors for every matrix layer whose factors are smaller.

    A layer d1 x d2 of rank r is sent as U diag(s)^(1/2) and diag(s)^(1/2) V', that is r (d1 + d2)
    values, or densely as d1 d2 values (FedSLR, Section 5). 1-D layers are dense.

    Args:
        values: Flat models [..., P].
        space: The layers of the models.
        ranks: The ranks of the matrix layers, int64 [..., number of matrix layers].

    Example:
        A layer of 4 x 6 weights with rank 1 is 4 + 6 values, its bias 4 values, each of 4 bytes:

        >>> space = ParameterSpace(torch.nn.Linear(6, 4))
        >>> low_rank(torch.zeros(28), space, torch.tensor([1])).nbytes
        tensor(56)
    """
    return Message(values, low_rank_size(space, ranks) * values.element_size())


def low_rank_size(space: ParameterSpace, ranks: Tensor) -> Tensor:
    """Returns the number of values that `low_rank` sends, int64 [...].

    The number is sum_l min(r_l (d1 + d2), d1 d2), plus the sizes of the 1-D layers.
    """
    pairs = [layer.matrix_shape for layer in space.matrices]
    shapes = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    area = shapes.prod(1)
    factors = torch.minimum(ranks.cpu() * shapes.sum(1), area)
    return factors.sum(-1) + (space.size - int(area.sum()))


def sparse(values: Tensor) -> Message:
    """Returns a message of the non-zero values, with 4-byte indices or a smaller bit mask.

    Example:
        Two values of 4 bytes; two indices take 8 bytes, a mask of 16 bits takes 2:

        >>> values = torch.zeros(16)
        >>> values[:2] = 1.0
        >>> int(sparse(values).nbytes)
        10
    """
    count = values.count_nonzero(-1)
    indices, bits = 4 * count, -(-values.shape[-1] // 8)
    return Message(values, count * values.element_size() + indices.clamp_max(bits))


def masked(values: Tensor, mask: Tensor) -> Message:
    """Returns a message of the values under a mask, bool [K], that server and clients share.

    The values outside of the mask are not sent: the receiver reads zeros there.

    Example:
        >>> masked(torch.zeros(5, 10), torch.arange(10) < 3).nbytes  # 3 float32 values
        12

    Raises:
        ConfigError: The mask is none of K values.
    """
    if mask.shape != values.shape[-1:]:
        raise ConfigError(
            f"model: masked(values, mask) got a mask {list(mask.shape)} for values "
            f"{list(values.shape)}; it must be [{values.shape[-1]}], the same for all clients; "
            f"sparse(values) sends what each client has kept"
        )
    sent = torch.where(mask, values, values.new_zeros(()))
    return Message(sent, int(mask.sum()) * values.element_size(), mask=mask)


class Ledger:
    """The bytes that each client has received and sent over all rounds.

    Memory grows with the clients that took part, not with the population.

    Args:
        num_clients: The population, M.

    Example:
        >>> ledger = Ledger(num_clients=3)
        >>> ledger.add(np.array([0, 2]), down=40, up=12)  # bytes of each; returns the sums
        (80, 24)
        >>> ledger.uplink.tolist()
        [12, 0, 12]
    """

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self._places: dict[int, int] = {}
        self._counts = np.zeros((2, 64), np.int64)  # down and up, by place; unused places are 0

    @property
    def downlink(self) -> np.ndarray:
        """Bytes that each client has received so far, int64 [M]."""
        return self.of(np.arange(self.num_clients))[0]

    @property
    def uplink(self) -> np.ndarray:
        """Bytes that each client has sent so far, int64 [M]."""
        return self.of(np.arange(self.num_clients))[1]

    def of(self, clients: np.ndarray) -> np.ndarray:
        """Returns the bytes that some clients have received and sent so far, int64 [2, C]."""
        places = [self._places.get(client, -1) for client in clients.tolist()]
        return self._counts[:, places]  # the last place is always unused

    def add(self, clients: np.ndarray, down: int | Tensor, up: int | Tensor) -> tuple[int, int]:
        """Counts each of some clients' bytes down and up, and returns the two sums."""
        known = self._places
        places = [known.setdefault(client, len(known)) for client in clients.tolist()]
        if (short := len(known) + 1 - self._counts.shape[1]) > 0:
            room = max(short, self._counts.shape[1])  # doubled: the counts are seldom copied
            self._counts = np.pad(self._counts, ((0, 0), (0, room)))
        sums = []
        for counts, count in zip(self._counts, (down, up), strict=True):
            bytes_each = np.broadcast_to(torch.as_tensor(count).cpu().numpy(), clients.shape)
            np.add.at(counts, places, bytes_each)
            sums.append(int(bytes_each.sum()))
        return sums[0], sums[1]

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the counts of the clients with any bytes (`clients`, ascending), as tensors."""
        ids = np.array(sorted(self._places), np.int64)
        counts = self.of(ids)
        some = counts.any(0)
        values = {"clients": ids[some], "downlink": counts[0, some], "uplink": counts[1, some]}
        return {name: torch.from_numpy(value) for name, value in values.items()}

    def load_state_dict(self, *states: dict[str, Tensor]) -> None:
        """Loads what `state_dict` returned, or the sum of several such dictionaries."""
        self._places, self._counts = {}, np.zeros_like(self._counts)
        for state in states:
            self.add(state["clients"].numpy(), state["downlink"], state["uplink"])
