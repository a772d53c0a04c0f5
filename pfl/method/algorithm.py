"""What a federated method is made of, and the round that it runs in."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from pfl.clients import Clients, steps_per_epoch
from pfl.communication import Message, dense
from pfl.distributed.collectives import gather, gather_rows, sum_over_processes
from pfl.engines.base import EngineName
from pfl.engines.local_step import (
    LocalOptimizer,
    OptimizerFactory,
    Step,
    check_elementwise,
    check_server_step,
)
from pfl.errors import Diverged, require
from pfl.method.module import FederatedModule, Network
from pfl.proximal import soft_threshold

Plan = tuple[int | None, int, int | None, str]  # batch size, epochs, steps, purpose
Sent = tuple[dict[str, Tensor], Tensor | int, Tensor | int]


class FederatedAlgorithm(FederatedModule):
    """A federated method. A subclass says what a client does and what the server does.

    Subclasses write `client_update`, and where they differ from FedAvg `server_update`,
    `download` and `personalized`; they declare what is remembered between rounds with
    `add_client_state` and `add_server_state`. See docs/add-a-method.md.

    Args:
        network: The architecture with its initial values. It always holds the global model.
        lr: Local learning rate η.
        lr_decay: Factor on `lr` after every round.
        weight_decay: Added to local gradients, weight_decay * w.
        local_epochs: Passes of a client over its own data in a round.
        local_steps: Where given, this many local steps instead of `local_epochs`.
        batch_size: Samples in a local step; null for all of the client's samples (full gradients).
        optimizer: An elementwise `torch.optim` optimizer of the clients, made anew in every round;
            its learning rate is `lr`. null: plain SGD.
        server_optimizer: Takes w - mean(w_i) as the gradient of the global model w. null: SGD with
            rate 1, which puts the mean in the place of w.
        weighting: Of clients in the mean: "samples", by their number of training samples, or
            "uniform".
        buffers: What happens to buffers that training changes (BatchNorm's running statistics):
            "average" as if they were parameters, or "local", every client keeps its own, which are
            then used wherever a model is evaluated on that client.
        loss: loss(output, target), one value per sample; null: cross entropy for integer targets,
            mean squared error for floating ones.
        engine: How the network is run: "auto", the fastest engine that works for it; "sequential",
            one client after another; "vmap", all clients at once; "debug", slowly, with client,
            round, epoch and step in every error.
    """

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
        super().__init__(network, batch_size, buffers, loss, engine)
        require("lr", lr, 0 < lr < math.inf, "positive and finite")
        require("lr_decay", lr_decay, lr_decay > 0, "positive")
        require("weight_decay", weight_decay, weight_decay >= 0, "at least 0")
        require("local_epochs", local_epochs, local_epochs >= 1, "at least 1")
        require("local_steps", local_steps, local_steps is None or local_steps >= 1, "at least 1")
        require("weighting", weighting, weighting in ("samples", "uniform"), "samples or uniform")
        self.lr, self.lr_decay, self.weight_decay = lr, lr_decay, weight_decay
        self.local_epochs, self.local_steps = local_epochs, local_steps
        self.weighting = weighting
        self.optimizer_factory = optimizer
        self.server_optimizer_factory = server_optimizer or partial(torch.optim.SGD, lr=1.0)
        if optimizer is not None:
            check_elementwise(optimizer([nn.Parameter(torch.zeros(1, 1))]))
        check_server_step(self.server_optimizer_factory)

    # ---- what a method writes -----------------------------------------------------------------

    def begin_round(self, round_index: int) -> None:
        """What the server does before a round (from 0); here nothing.

        Every process calls it once a round, for what needs all participants together.
        """

    def client_update(self, clients: Clients, w: Tensor) -> Tensor | Message | dict[str, Message]:
        """What C clients do in a round, and what they send.

        Args:
            clients: Their data, and in `clients.state` their rows of every declared client state;
                rows that are left there are kept for the next round.
            w: The received global model, [P].

        Returns:
            The clients' models [C, P], or what else they send as messages by name. The weighted
            mean over the cohort is what `server_update` gets.
        """
        raise NotImplementedError(f"{type(self).__name__} must say what a client does")

    def server_update(self, mean: dict[str, Tensor]) -> None:
        """What the server does with the cohort's means; here a step of the server optimizer.

        A method that sets `global_model` itself leaves `space.vector.grad` alone.
        """
        self.space.vector.grad = self.global_model - mean["w"]

    def download(self) -> Message:
        """What the server sends to every client of a round; its values are `w` [P]."""
        return dense(self.global_model)

    # ---- what a method uses -------------------------------------------------------------------

    def log_metric(self, name: str, value: float) -> None:
        """Add a number to this round's row of metrics; it must be the same on every process."""
        self._reported[name] = value

    def log_table(self, table: str, **columns: Tensor | np.ndarray) -> None:
        """Add rows to `<table>.csv` in the run's folder, behind a first column with the round.

        Args:
            table: One of the class's `tables`.
            columns: A value for each row. The rows of a round are written in the order of the
                columns' values, so that chunks and processes do not matter.
        """
        rows = [c.cpu().numpy() if isinstance(c, Tensor) else c for c in columns.values()]
        self._recorded[table].append(dict(zip(columns, rows, strict=True)))

    def log_loss(self, name: str, loss: Tensor, counts: list[int]) -> None:
        """Book what a training loop of the method's own has evaluated.

        Args:
            name: The losses appear as `<name>/loss`, their mean over samples.
            loss: Of the rows of a batch, [A].
            counts: How many samples each row has; they are counted in `train/samples`.
        """
        self._losses.setdefault(name, []).append((loss, counts))

    def learning_rate(self, round_index: int) -> float:
        """The local learning rate of a round (from 0)."""
        return self.lr * self.lr_decay**round_index

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        """What a round costs clients of these sizes, relative to each other: sample gradients."""
        if self.local_steps is None:
            return sizes
        return sizes / np.maximum(steps_per_epoch(sizes, self.batch_size), 1)

    def local_sgd(
        self,
        clients: Clients,
        start: Tensor,
        *,
        linear: Tensor | None = None,
        prox_weight: float = 0.0,
        prox_center: Tensor | float = 0.0,
        l1: float = 0.0,
        offset: Tensor | None = None,
        prox: Callable[[Tensor, float], Tensor] | None = None,
        epochs: int | None = None,
        name: str = "train",
    ) -> Tensor:
        """Local training of f_i(v + offset) + <linear, v> + prox_weight/2 |v - prox_center|^2 + l1 |v|_1.

        Proximal steps v <- soft(v - lr (g + linear + prox_weight (v - prox_center)), lr l1), g a
        mini-batch's gradient at v + offset; or the method's `optimizer` takes that direction.

        Args:
            start: Of v, [P] for all clients or [C, P]. So are `linear`, `prox_center` and `offset`.
            prox: Applied after each step with the learning rate, such as one that lowers ranks.
            epochs: Instead of the method's `local_epochs` and `local_steps`.
            name: Keys the order of samples, and names the logged loss `<name>/loss`.

        Returns:
            v after the local steps, [C, P]. Clients without samples keep their start.
        """
        v = start.expand(len(clients), self.space.size).clone()
        lr = self.learning_rate(clients.round)
        steps = self.local_steps if epochs is None else None
        plan = (self.batch_size, epochs or self.local_epochs, steps, name)
        offset = None if offset is None else offset.expand_as(v)
        if not isinstance(prox_center, Tensor) and prox_center:
            prox_center = torch.full_like(v, prox_center)
        drift = prox_weight * prox_center if prox_weight else 0.0
        drift = drift if linear is None else drift - linear
        if prox is None and self.optimizer_factory is None:
            shift = (lr * drift).expand_as(v) if isinstance(drift, Tensor) else None
            shrink = 1 - lr * (self.weight_decay + prox_weight)
            self.run_local_steps(clients, v, Step(lr, shrink, shift, offset, lr * l1), plan, name)
            return v
        optimizer = LocalOptimizer(v, lr, self.weight_decay, self.optimizer_factory)
        for batch in clients.batches(*plan):
            at = v if offset is None else v + offset
            loss, g = self.oracle.gradient(at, batch, clients.buffers)
            if prox_weight or linear is not None:
                g = g + prox_weight * v - drift
            optimizer.step(g, batch.clients)
            rows = v[: batch.clients]
            if l1 > 0:
                rows.copy_(soft_threshold(rows, lr * l1))
            if prox:
                rows.copy_(prox(rows, lr))
            self.log_loss(name, loss, batch.counts)
        return v

    def run_local_steps(
        self, clients: Clients, v: Tensor, step: Step, plan: Plan, name: str
    ) -> None:
        """Plain local steps of v [C, P] in place, by several threads where none needs the lock.

        Args:
            plan: Arguments of `Clients.step_blocks`: batch size, epochs, steps, purpose.
            name: The losses appear as `<name>/loss`.
        """
        data = clients.data
        free = data.in_memory and self.oracle.engine.releases_gil()
        parts = self.threads.workers(len(clients)) if free else 1

        def train_part(part: int) -> tuple[Tensor, list[int]]:
            # Every second client and so on, since the first ones have more samples.
            rows = slice(part, None, parts)
            own = clients.rows(rows)
            with torch.no_grad():
                return self.oracle.descend(
                    v[rows], own.step_blocks(*plan), step.rows(rows), own.buffers
                )

        for booked in self.threads.map(train_part, range(parts)):
            self.log_loss(name, *booked)

    # ---- the round ----------------------------------------------------------------------------

    def training_step(self, clients: Clients, batch_idx: int = 0) -> None:
        """One chunk of the round's cohort; with the last one the server's step."""
        with self.in_full_precision():
            if clients.first:
                self._begin_round(clients.round)
            # An empty chunk runs too where it is the first: it gives the shapes of the sums.
            if len(clients) or not self._sums:
                self._train(clients)
            if clients.last:
                self._finish_round()

    def _begin_round(self, round_index: int) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weightings: dict[str, str] = {}
        self._losses: dict[str, list[tuple[Tensor, list[int]]]] = {}
        self._reported: dict[str, float] = {}
        self._recorded: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in self.tables}
        self._counts = np.zeros(4)  # samples, clients, bytes down, bytes up
        self.begin_round(round_index)
        self._message = self.download()

    def _train(self, clients: Clients) -> None:
        if self.device.type == "cpu":  # a GPU may not hold all of them
            self.load_state(clients)
        size = self.oracle.engine.group_size(len(clients), self.threads.count)
        for group, (totals, down, up) in self.in_groups(clients, self._train_group, size):
            for name in self.store.names:
                self.store.write(name, group.ids, group.state[name])
            for name, total in totals.items():
                if name in self._sums:
                    self._sums[name] += total  # in place: new memory costs more than the sum
                else:
                    self._sums[name] = total
            booked = self.ledger.add(group.ids, down, up)
            self._counts += [group.sizes.sum(), len(group), *booked]

    def _train_group(self, clients: Clients) -> Sent:
        """What `_sent` gives; where it fails nothing stays booked."""
        before = {name: len(entries) for name, entries in self._losses.items()}
        recorded = {name: len(entries) for name, entries in self._recorded.items()}
        try:
            return self._sent(clients)
        except RuntimeError:
            for name, losses in self._losses.items():
                del losses[before.get(name, 0) :]
            for name, rows in self._recorded.items():
                del rows[recorded[name] :]
            raise

    def _sent(self, clients: Clients) -> Sent:
        """The weighted sums of what a group of clients sends, and the bytes down and up."""
        with self.in_full_precision():
            if not clients.state:
                self.load_state(clients)
            with self.oracle.guard(clients, self._shared):
                sent = self.client_update(clients, self._message.values)
        messages = sent if isinstance(sent, dict) else {"w": sent}
        messages = {k: m if isinstance(m, Message) else dense(m) for k, m in messages.items()}
        down, up = self._message.nbytes, sum(m.nbytes for m in messages.values())
        if clients.buffers is not None and self.buffer_policy == "average":
            messages["buffers"] = dense(clients.buffers)
            down, up = down + messages["buffers"].nbytes, up + messages["buffers"].nbytes
        elif clients.buffers is not None:
            clients.state["buffers"] = clients.buffers
        totals = {}
        for name, message in messages.items():
            self._weightings[name] = message.weighting or self.weighting
            uniform = self._weightings[name] == "uniform"
            weight = np.ones(len(clients)) if uniform else clients.sizes
            weights = torch.from_numpy(weight).to(self.global_model)
            totals[name] = weights @ message.values.to(weights.dtype)
        return totals, down, up

    def _shared(self) -> dict[str, Tensor]:
        """Returns what all clients share, by the name that a method has for it."""
        states = {f"self.{name}": state for name, state in self.named_buffers(recurse=False)}
        return {"w": self._message.values, "self.global_model": self.global_model, **states}

    def _finish_round(self) -> None:
        counts, losses = self._booked()
        samples, clients, down, up = counts.tolist()
        self.participants = int(clients)
        weight = {"samples": samples, "uniform": clients}
        if weight[self.weighting] > 0:
            mean = {
                name: sum_over_processes(total).div_(weight[self._weightings[name]])
                for name, total in self._sums.items()
            }
            if not all(_finite(total) for total in mean.values()):
                raise Diverged(
                    f"model.lr: {self.lr}; the clients' models are no longer finite in round "
                    f"{self.rounds + 1}, a smaller one may help"
                )
            if "buffers" in mean:
                self.oracle.buffers.write(self.network, mean.pop("buffers"))
            self.server_update(mean)
        # Where the method set the model itself, or nobody reported, there is no gradient and this
        # moves nothing; Lightning counts rounds, and saves checkpoints, by optimizer steps.
        optimizer = cast(torch.optim.Optimizer, self.optimizers())
        optimizer.step()
        self.space.vector.grad = None
        self.rounds += 1
        self.samples_seen += sum(float(n) for _, n in losses.values())
        self.bytes_down += int(down)
        self.bytes_up += int(up)
        self.row = {
            "round": self.rounds,
            **{f"{name}/loss": float(total / n) for name, (total, n) in losses.items() if n > 0},
            "train/samples": self.samples_seen,
            "comm/uplink_bytes": self.bytes_up,
            "comm/downlink_bytes": self.bytes_down,
            "participants": self.participants,
            **self._reported,
        }
        self._log_round(self.row)
        self.recorded = {name: gather_rows(parts) for name, parts in self._recorded.items()}

    def _booked(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Of all processes: the counts, and the losses' sum and number of samples by name."""
        booked: dict[str, np.ndarray] = {}
        for name, observed in self._losses.items():
            counts = np.concatenate([counts for _, counts in observed])
            losses = torch.cat([loss for loss, _ in observed]).double().cpu().numpy()
            # Sorted, since threads come in any order.
            booked[name] = np.array([np.sort(losses * counts).sum(), counts.sum()])
        counts, sums = np.zeros_like(self._counts), dict[str, np.ndarray]()
        for own, one in gather((self._counts, booked)):
            counts += own
            for name, entry in one.items():  # a process without clients has observed nothing
                sums[name] = sums.get(name, 0) + entry
        return counts, sums

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The server's optimizer of the global model."""
        return self.server_optimizer_factory([self.space.vector])


def _finite(values: Tensor) -> bool:
    """Whether all are; their sum tells it several times sooner, but may itself overflow."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
