"""What a federated method is made of, and the round that it runs in."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from pfl.clients import Clients
from pfl.communication import Message, dense
from pfl.engines.base import EngineName
from pfl.engines.local_step import (
    OptimizerFactory,
    check_server_step,
)
from pfl.errors import Diverged, require_one_of
from pfl.method import checks
from pfl.method.local_training import LocalTraining
from pfl.method.module import Network
from pfl.method.round_totals import RoundTotals, not_finite

Sent = tuple[dict[str, Tensor], Tensor | int, Tensor | int]
"""A group's weighted sums of messages by name, and each client's bytes down and up."""


class FederatedAlgorithm(LocalTraining):
    """A federated method: a subclass defines what a client does and what the server does.

    Subclasses write `client_update` and, where they differ from FedAvg, `server_update`,
    `download` and `personalized`. They declare what is remembered between rounds with
    `add_client_state` and `add_server_state`. See docs/add-a-method.md.

    Args:
        network: The architecture with its initial values. It always holds the global model.
        lr: Local learning rate η.
        lr_decay: Factor on `lr` after every round.
        weight_decay: A factor; weight_decay * w is added to local gradients.
        local_epochs: Passes of a client over its own data in a round.
        local_steps: A number of local steps that replaces `local_epochs`; null: none does.
        batch_size: Samples in a local step; null: all of the client's samples (full gradients).
        optimizer: An elementwise `torch.optim` optimizer of the clients, made anew in every round,
            with the learning rate `lr`. null: plain SGD.
        server_optimizer: An optimizer that takes w - mean(w_i) as the gradient of the global model
            w. null: SGD with rate 1, which replaces w by the mean.
        weighting: The clients' weights in the mean: "samples" (their numbers of training samples)
            or "uniform".
        buffers: What happens to buffers that training changes (BatchNorm's running statistics).
            "average": those of the models that clients send are averaged as if they were
            parameters. "local": every client keeps its own. In both cases a personalized model that
            is trained beside the model that is sent has its own, which its client keeps.
        loss: loss(output, target), one value per sample; null: cross entropy for integer targets,
            mean squared error for floating targets.
        engine: How the network is run: "auto", the fastest engine that works for it; "sequential",
            one client after another; "vmap", all clients at once; "debug", slowly, with client,
            round, epoch and step in every error (docs/add-a-method.md).

    Attributes:
        participants: Number of clients whose messages arrived in the round; set before
            `server_update`.

    Example:
        FedAvg whose clients stop after two steps, whatever the arguments say:

        >>> from models import MLP
        >>> class TwoSteps(FederatedAlgorithm):
        ...     def client_update(self, clients, w):
        ...         v = w.repeat(len(clients), 1)
        ...         for batch in clients.batches(LocalSchedule(self.batch_size, steps=2)):
        ...             loss, g = self.oracle.gradient(v, batch, clients.buffers)
        ...             v -= self.learning_rate(clients.round) * g
        ...             self.log_loss("train", loss, batch.counts)
        ...         return v
        >>> method = TwoSteps(MLP(64, (8,)), lr=0.05)
        >>> method.global_model.shape  # 64 * 8 + 8 + 8 * 10 + 10
        torch.Size([610])
    """

    pooled: ClassVar[bool] = False
    """True if one model is trained on the training samples of all clients, and nothing is sent.

    In every round `client_update` then gets a single client, which owns the samples of all clients
    that train; the cohort does not matter, unless it is empty, and nobody fails or is slow.
    """
    sends_first: ClassVar[bool] = False
    """True if clients send before they train, so that a client that fails has sent its message."""

    def __init__(
        self,
        network: Network,
        *,
        lr: float = 0.1,
        lr_decay: float = 1.0,
        weight_decay: float = 0.0,
        local_epochs: int = 1,
        local_steps: int | None = None,
        batch_size: int | None = 32,
        optimizer: OptimizerFactory | None = None,
        server_optimizer: OptimizerFactory | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["average", "local"] = "average",
        loss: nn.Module | None = None,
        engine: EngineName = "auto",
    ) -> None:
        super().__init__(
            network,
            lr,
            lr_decay,
            weight_decay,
            local_epochs,
            local_steps,
            batch_size,
            optimizer,
            buffers,
            loss,
            engine,
        )
        require_one_of("weighting", weighting, "samples", "uniform")
        self.weighting = weighting
        self.server_optimizer_factory = server_optimizer or partial(torch.optim.SGD, lr=1.0)
        check_server_step(self.server_optimizer_factory)
        self.participants = 0
        self._totals = RoundTotals(weighting, self.tables)
        self._message = dense(self.global_model)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuses a method that replaces a private function of the framework by accident."""
        super().__init_subclass__(**kwargs)
        private = (name for name in vars(cls) if name[0] == "_" != name[1:2])
        if taken := [name for name in private if callable(getattr(FederatedAlgorithm, name, None))]:
            raise TypeError(f"{cls.__name__}: {', '.join(taken)} belong to the framework; rename")

    # ---- what a method writes -----------------------------------------------------------------

    def begin_round(self, round_index: int) -> None:
        """Computes what the server needs before a round (from 0); here nothing.

        Every process calls it once a round, so that sums over processes are possible here.
        """

    def client_update(self, clients: Clients, w: Tensor) -> Tensor | Message | dict[str, Message]:
        """Trains C clients for a round and returns what they send.

        Args:
            clients: The clients' data, and in `clients.state` their rows of every declared client
                state; the rows that are there afterwards are kept for the client's next round.
            w: The received global model, [P].

        Returns:
            The clients' models [C, P], or other messages by name. `server_update` gets the weighted
            mean of each message over the cohort.
        """
        raise NotImplementedError  # `setup` has refused the method

    def server_update(self, mean: dict[str, Tensor]) -> None:
        """Updates the global model from the cohort's means; here by a server optimizer's step.

        A method that sets `global_model` itself leaves `space.vector.grad` alone.
        """
        self.space.vector.grad = self.global_model - mean["w"]

    def download(self) -> Message:
        """Returns what the server sends to every client of a round; its values are `w` [P]."""
        return dense(self.global_model)

    # ---- what a method uses -------------------------------------------------------------------

    def log_metric(self, name: str, value: float) -> None:
        """Adds a number to the round's row of metrics; it must be the same on every process.

        Call it from `begin_round` to `server_update`: a number that is logged between two rounds
        belongs to no row.
        """
        self._totals.metrics[name] = value

    def log_table(self, table: str, **columns: Tensor | np.ndarray) -> None:
        """Adds rows to `<table>.csv` in the run's folder, after a first column with the round.

        Args:
            table: One of the class's `tables`.
            columns: A value for each row. The rows of a round are sorted by the columns from left
                to right, so that chunks and processes do not matter.
        """
        rows = [c.cpu().numpy() if isinstance(c, Tensor) else c for c in columns.values()]
        self._totals.tables[table].append(dict(zip(columns, rows, strict=True)))

    def setup(self, stage: str) -> None:
        """Checks that the method is complete, and sets it up."""
        checks.check_complete(self, FederatedAlgorithm)
        super().setup(stage)

    # ---- the round ----------------------------------------------------------------------------

    def training_step(self, clients: Clients, batch_idx: int = 0) -> None:
        """Trains one chunk of the round's cohort; after the last chunk the server updates."""
        with self.in_full_precision():
            if clients.first:
                self._totals = RoundTotals(self.weighting, self.tables)
                self.begin_round(clients.round)
                self._message = self.download()
            self._train(self._pool(clients) if self.pooled else clients)
            if clients.last:
                self._finish_round()

    def _pool(self, clients: Clients) -> Clients:
        """Returns the owner of all samples instead of the chunk with the cohort's first client.

        Returns no client instead of any other chunk.
        """
        here = np.isin(self.cohort(clients.round)[:1], clients.ids)
        pool = clients.data.as_one_client(self.population)
        return replace(clients, ids=np.zeros(here.sum(), np.int64), data=pool)

    def _train(self, clients: Clients) -> None:
        """Trains a chunk of clients, and keeps the states and messages of those that report."""
        if self.device.type == "cpu":  # a GPU may not hold the states of the whole chunk
            self.load_state(clients)
        whole = [(clients, True)]  # a pool does not fail
        for part, arrives in whole if self.pooled else self._loop.participation.parts(clients):
            if not arrives:
                kept, self._totals = self._totals, RoundTotals(self.weighting, self.tables)
                self._train_part(part, arrives)
                kept.add_lost(self._totals)
                self._totals = kept
            # A first chunk without clients runs as well: it gives the shapes of the sums.
            elif len(part) or not self._totals.sums:
                self._train_part(part, arrives)

    def _train_part(self, clients: Clients, arrives: bool) -> None:
        """Trains clients in groups; what they send and remember is kept only if it `arrives`."""
        size = self.oracle.engine.group_size(len(clients), self.threads.count)
        for group, (sums, down, up) in self.in_groups(clients, self._train_group, size):
            if arrives:
                for name in self.store.names:
                    self.store.write(name, group.ids, group.state[name])
            nbytes = self.ledger.add(group.ids, down, up if arrives or self.sends_first else 0)
            self._totals.add(sums, [group.sizes.sum(), len(group), *nbytes])

    def _train_group(self, clients: Clients) -> Sent:
        """Trains a group of clients, and returns what they send."""
        with self._totals.rollback(), self.in_full_precision():
            if not clients.state:
                self.load_state(clients)
            w = self._message.values
            with self.oracle.guard(clients, lambda: {"w": w, **self.shared_tensors()}):
                sent = self.client_update(clients, w)
            messages = checks.messages(self, sent, clients)
            checks.check_declared(self, clients.state)
            down, up = self._message.nbytes, sum(m.nbytes for m in messages.values())
            if clients.buffers is not None and self.buffer_policy == "average":
                messages["buffers"] = buffers = dense(clients.buffers)
                if not self.pooled:
                    down, up = down + buffers.nbytes, up + buffers.nbytes
            elif clients.buffers is not None:
                clients.state["buffers"] = clients.buffers
            for name in self.store.names:
                clients.state[name] = self.store.rounded(name, clients.state[name])
            self._totals.check_states(clients.state)
            if "personal_buffers" in clients.state:  # clients without samples have trained nothing
                clients.state["personal_buffers"][clients.empty] = torch.nan
            return self._totals.weigh(messages, clients.sizes, self.global_model), down, up

    def _finish_round(self) -> None:
        """Adds everything up over processes, updates the global model and logs the round's row."""
        totals = self._totals
        totals.reduce()
        _, clients, down, up, dropped, _ = totals.counts.tolist()
        self.participants = int(clients)
        mean = totals.means()
        self._require_none("the client state", totals.not_finite)
        self._require_none("the clients' message", not_finite(mean or {}))
        if mean is not None:
            if "buffers" in mean:
                self.oracle.buffers.write(self.network, mean.pop("buffers"))
            checks.check_nothing(self, "server_update", cast(Any, self).server_update(mean))
        # Without a gradient (the method set the model itself, or no client took part) this step
        # moves nothing. Lightning counts rounds, and saves checkpoints, by optimizer steps.
        optimizer = cast(torch.optim.Optimizer, self.optimizers())
        optimizer.step()
        gradient, self.space.vector.grad = self.space.vector.grad, None
        kept = self.shared_tensors() | optimizer.state.get(self.space.vector, {})
        if names := not_finite(kept):
            self._check_server_update(names, gradient)
            self._require_none("the server's", names)
        self.rounds += 1
        self.samples_seen += totals.samples
        self.bytes_down += int(down)
        self.bytes_up += int(up)
        self.row = {
            "round": self.rounds,
            **{f"{name}/loss": loss for name, loss in totals.mean_losses().items()},
            "train/samples": self.samples_seen,
            "comm/uplink_bytes": self.bytes_up,
            "comm/downlink_bytes": self.bytes_down,
            "participants": self.participants,
            **({"dropped": int(dropped)} if self._loop.participation.dropout else {}),
            **totals.metrics,
        }
        self._log_row(self.row)
        self.recorded = totals.gathered_tables()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the server's optimizer of the global model."""
        return self.server_optimizer_factory([self.space.vector])

    def _check_server_update(self, names: set[str], gradient: Tensor | None) -> None:
        """Raises Diverged if `server_update`, and not the server's optimizer, is the cause.

        Args:
            names: What is not finite after the optimizer's step.
            gradient: What `server_update` left for the optimizer; None: nothing.
        """
        own = {name for name in names if name.startswith("self.")}
        if gradient is not None:
            own.discard("self.global_model")  # the optimizer has moved it
            own |= not_finite({"self.space.vector.grad": gradient})
        if own:
            raise Diverged(
                f"model: server_update of {type(self).__name__} gave values that are not finite in "
                f"round {self.rounds + 1}: {', '.join(sorted(own))}"
            )

    def _require_none(self, whose: str, not_finite: set[str]) -> None:
        """Raises Diverged if there are names of values that are not finite."""
        if not_finite:
            names = ", ".join(sorted(name.removeprefix("self.") for name in not_finite))
            raise Diverged(
                f"model.lr: {self.lr}; {whose} {names} is no longer finite in round "
                f"{self.rounds + 1}, a smaller rate may help"
            )
