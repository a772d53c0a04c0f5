"""The base of methods whose server takes messages as they come, and does not wait for a cohort."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pfl.communication import Message, dense
from pfl.datamodules.ranges import Count
from pfl.method.algorithm import FederatedAlgorithm
from pfl.method.local_training import Network


class Buffered(FederatedAlgorithm):
    """A server that moves the model whenever K messages have arrived, in virtual time.

    With `loop.clock`, `loop.clients_per_round` clients train at any time (`pfl.rounds.arrivals`).
    A round is one move of the server: its cohort are the clients whose messages then arrive, each
    of which trains from the model that the server had when the client began. A client's staleness
    τ is the number of moves since. Its download is counted with its message.

    Without `loop.clock`, and with `loop.trace`, all clients of a cohort begin with the current
    model, so that a round is one of FedAvg and τ = 0.

    A subclass writes `client_update`, whose messages come from `rows`, and `server_update`, where
    `shares()` are the weights of the messages and `staleness()` their τ.
    Server state: the models with which the clients in training began, as many as train at a time.
    The mean τ of a round is in the column `staleness`.

    Args:
        buffer_size: K, at most the number of clients.
        weighting: As for every method, of the K messages.

    Note:
        Rates (`lr_decay`), sample orders and failures (`loop.dropout`) are those of the round in
        which a message arrives; the message of a client that fails takes a place in the buffer and
        is in no mean. Running statistics stay with the clients (`buffers: local`).
    """

    starts: Tensor
    buffer_size: int

    def __init__(
        self,
        network: Network,
        *,
        buffer_size: Count,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(network, weighting=weighting, buffers="local", **kwargs)
        self.buffer_size = buffer_size
        self._models: Tensor | None = None
        self.add_server_state("starts", self._first_starts)

    def _first_starts(self) -> Tensor:
        who = self.run.loop.participation
        return self.global_model.repeat(who.at_once if who.clock and who.trace is None else 0)

    def check_setup(self) -> None:
        self.run.loop.participation.check_buffer(self.buffer_size, type(self).__name__)

    def begin_round(self, round_index: int) -> None:
        """Finds the models with which the clients whose messages now arrive have begun."""
        arrivals = self.run.loop.participation.arrivals(round_index)
        self._ids = self.cohort(round_index)
        self._models = None
        self._staleness = np.zeros(len(self._ids), np.int64)
        if arrivals is not None:
            starts = self.starts.view(-1, self.space.size)
            w = self.global_model
            self._models = starts[torch.from_numpy(arrivals.slots)]
            self._models[torch.from_numpy(arrivals.versions == round_index)] = w
            starts[torch.from_numpy(arrivals.begun)] = w
            self._staleness = round_index - arrivals.versions
            self.log_metric("staleness", self._staleness.mean())

    def download_for(self, ids: np.ndarray) -> Tensor | dict[str, Message]:
        """Returns the model with which each client has begun, in place of the current one."""
        if self._models is None:
            return {}
        return self._models[torch.from_numpy(np.searchsorted(self._ids, ids))]

    def staleness(self) -> Tensor:
        """Returns τ of the messages that have arrived, [n], in `server_update`."""
        rows = np.searchsorted(self._ids, self.participant_ids)
        return torch.from_numpy(self._staleness[rows]).to(self.global_model)

    def shares(self) -> Tensor:
        """Returns the weights of the messages that have arrived, [n], whose sum is 1."""
        sizes = torch.from_numpy(self.client_sizes[self.participant_ids]).to(self.global_model)
        weights = torch.ones_like(sizes) if self.weighting == "uniform" else sizes
        return weights / weights.sum().clamp_min(1)

    def rows(self, values: Tensor) -> dict[str, Message]:
        """Returns the clients' messages "w" [C, P], which the server gets one by one."""
        return {"w": dense(values, reduce="rows")}
