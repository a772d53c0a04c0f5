"""What the author of a method uses: declarations, facts of the run, kept messages and logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from pfl.clients import Clients
from pfl.clients.store import ClientStore
from pfl.communication import Message
from pfl.distributed.collectives import sum_over_processes
from pfl.errors import ConfigError, Diverged
from pfl.method.facts import RunFacts, loop_of
from pfl.method.local_training import LocalTraining, Network
from pfl.method.log import current_log
from pfl.method.states import KEPT, States
from pfl.randomness import generator

# The first words of the numbers that a row of `metrics.csv` has in every run.
OF_EVERY_RUN = ("round", "participants", "dropped", "train", "val", "test", "comm", "parameters")


class MethodTools(LocalTraining):
    """What a method may call and read; `Method` has what it writes.

    Args:
        network: The architecture with its initial values. It always holds the global model.
        **kwargs: The arguments of local training; see `LocalTraining`.

    Attributes:
        states: The declared client states and kept messages, with the rows of all clients.
        row: The last round's row of metrics.
        recorded: The last round's rows of each table by column.
        server_states: The names of the server states.
    """

    tables: ClassVar[tuple[str, ...]]

    def __init__(self, network: Network, **kwargs: Any) -> None:
        super().__init__(network, **kwargs)
        self.states = States(type(self).__name__)
        self.row: dict[str, float] = {}
        self.recorded: dict[str, dict[str, np.ndarray]] = {}
        self._metrics: dict[str, float] = {}  # of the round that runs
        self.server_states: set[str] = set()
        self._late_states: dict[str, Callable[[], Tensor | nn.Module]] = {}  # made in `setup`
        self._loaded_states: dict[str, Tensor] = {}  # of a checkpoint, before that

    # ---- what a method declares ---------------------------------------------------------------

    def add_server_state(
        self, name: str, initial: Tensor | nn.Module | Callable[[], Tensor | nn.Module]
    ) -> None:
        """Declares what the server keeps between rounds; it becomes `self.<name>`.

        Clients cannot read it: `download` sends them what they need.

        Args:
            name: A name that is not yet taken.
            initial: A tensor of any shape; or a module, whose parameters and buffers are kept, and
                which gets the models' device and dtype; or a function that returns one of them,
                called in `setup`, when the network has been inspected and its running statistics
                are known. No gradients are recorded for a module's parameters.
        """
        self._refuse_taken(name)
        if isinstance(initial, Tensor):
            self.register_buffer(name, initial)
        elif isinstance(initial, nn.Module):
            self.register_module(name, initial.to(self.space.vector).requires_grad_(False))
        elif callable(initial):
            self._late_states[name] = initial
        else:
            raise ConfigError(
                f"model: {type(self).__name__} declares the server state {name!r} with initial="
                f"{initial!r}; it must be a tensor, such as torch.tensor({initial!r}), a module, "
                f"or a function that returns one of them"
            )
        self.server_states.add(name)

    def add_constant(self, name: str, value: Tensor) -> None:
        """Declares a tensor that server and clients know from the start; it becomes `self.<name>`.

        It follows from the arguments, such as a mask of the layers that are shared, and never
        changes.
        """
        self._refuse_taken(name)
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"model: {type(self).__name__} declares the constant {name!r} as {value!r}; it "
                f"must be a tensor; keep a number as an attribute"
            )
        self.register_buffer(name, value)

    def _refuse_taken(self, name: str) -> None:
        """Refuses a state or constant whose name another attribute has."""
        if hasattr(self, name):
            raise ConfigError(
                f"model: {type(self).__name__} declares {name!r}, which is an attribute of its own "
                f"already; take another name"
            )

    def add_client_state(
        self, name: str, initial: Callable[[], Tensor] | float = 0.0, *, sparse: bool = False
    ) -> None:
        """Declares what each client keeps between rounds; its rows are in `clients.state[name]`.

        Args:
            name: A name that is not yet taken.
            initial: The first value for every client: a number, for P copies of it, or a function
                that returns the row [width], called when training begins
                (`self.first_model`: the initial model).
            sparse: Most values will be zero; only the others are stored.

        Raises:
            ConfigError: The method, or one that it inherits from, has such a client state.
        """
        self._refuse_second("client state", name, self.states.declared)
        self.states.declare(name, initial, sparse=sparse)

    def _refuse_second(self, kind: str, name: str, known: Collection[str]) -> None:
        """Refuses a state or message that would take the place of one of the same name."""
        if name in known:
            raise ConfigError(
                f"model: {type(self).__name__} declares the {kind} {name!r} twice, or one that it "
                f"inherits; take another name"
            )

    def first_model(self) -> Tensor:
        """Returns the global model, [P], for a declared state or message that begins as a copy."""
        return self.global_model

    def keep_messages(self, name: str, initial: Callable[[], Tensor] | float = 0.0) -> None:
        """Declares that the server keeps the last message `name` of every client.

        Such a message is not averaged. The server reads the rows with `kept_rows`, `kept_ids`,
        `kept_mean` and `iter_kept`, in `begin_round`, `server_update` or `begin_evaluation`. They
        are stored as client states are: on the device, in memory or in files.

        Args:
            name: The name under which `client_update` or `first_upload` returns the message.
            initial: The row of a client that has sent none yet, as for `add_client_state`.

        Raises:
            ConfigError: The method, or one that it inherits from, keeps such a message.
        """
        self._refuse_second("kept message", name, self.states.messages)
        self.states.keep(name, initial)

    def make_late_states(self) -> None:
        """Makes the server states that are not there yet, with the values of a checkpoint."""
        for name, initial in self._late_states.items():
            if not hasattr(self, name):
                self.add_server_state(name, initial())
        if self._loaded_states:
            self.load_state_dict({**self.state_dict(), **self._loaded_states})
            self._loaded_states.clear()

    def load_late_states(self, saved: dict[str, Tensor]) -> None:
        """Takes the server states whose first value is a function from a checkpoint's tensors.

        Those of states that are not there yet are taken out of `saved`, and kept until then.
        """
        for key in list(saved):
            name = key.partition(".")[0]
            if name not in self._late_states:
                continue
            if not hasattr(self, name):
                self._loaded_states[key] = saved.pop(key)
            elif key == name:  # another run's settings may give it another shape
                setattr(self, key, saved[key].to(getattr(self, key), copy=True))

    # ---- what a method uses -------------------------------------------------------------------

    def descend_at_server(
        self,
        values: Tensor,
        gradient: Callable[[Tensor, int], tuple[Tensor, Tensor]],
        *,
        steps: int,
        lr: float,
        cosine: bool = False,
    ) -> float:
        """Takes steps of Adam on values [K] in place; for `train_server`. Returns the mean loss.

        Adam begins anew in each call (Kingma and Ba, ICLR 2015; PyTorch's other defaults).

        Args:
            values: What is trained, such as `self.global_model`.
            gradient: A function of values [K] and the number of the step, from 0, that returns a
                loss and its gradient [K].
            steps: The number of steps. Without any the mean loss is NaN.
            lr: The rate.
            cosine: Whether step k of n has the rate lr (1 + cos(π k / n)) / 2.

        Raises:
            Diverged: The values are no longer finite.
        """
        moved = nn.Parameter(values.clone())
        adam = torch.optim.Adam([moved], lr=lr)
        total = values.new_zeros(())
        for step in range(steps):
            if cosine:
                adam.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2
            loss, moved.grad = gradient(moved.detach(), step)
            total += loss
            adam.step()
        if not moved.isfinite().all():
            raise Diverged(
                f"model.server_lr: {lr}; the training at the server of {type(self).__name__} gave "
                f"values that are not finite in round {self.rounds + 1}; a smaller rate may help"
            )
        values.copy_(moved.detach())
        if steps == 0:
            return math.nan
        return float(total / steps)

    @property
    def global_model(self) -> Tensor:
        """The global model, [P]; write into it with `copy_`. Clients read what they receive."""
        return self.space.vector.detach()  # `.data` would not count writes, which `guard` asks for

    @global_model.setter
    def global_model(self, values: Tensor) -> None:
        raise ConfigError(
            f"model: {type(self).__name__} assigns to self.global_model, which stays the same "
            f"tensor; write self.global_model.copy_(values)"
        )

    @property
    def global_buffers(self) -> Tensor:
        """The running statistics of the global model, [B]; empty for a network without any."""
        return self.oracle.buffers.read(self.network, self.space.vector.detach())

    def server_tensors(self) -> dict[str, Tensor]:
        """Returns the global model and the server states, by the names that a method has for them.

        Constants are among them.
        """
        states = {f"self.{name}": state for name, state in self.named_buffers(recurse=False)}
        for name, module in self.named_children():
            if name in self.server_states:
                states |= {f"self.{name}.{key}": v for key, v in module.state_dict().items()}
        return {"self.global_model": self.space.vector.detach(), **states}

    @property
    def sends_statistics(self) -> bool:
        """Whether models are sent with their running statistics, which are then averaged."""
        return self.oracle.buffers.size > 0 and self.buffer_policy == "average"

    @property
    def rounds(self) -> int:
        """Number of rounds that are over; in `client_update` use `clients.round`."""
        return self.progress.rounds

    @property
    def participants(self) -> int:
        """How many clients' messages arrived in the round; known in `server_update`.

        In a private run the expected number of clients in a round.
        """
        return self.progress.participants

    @property
    def participant_ids(self) -> np.ndarray:
        """The ids of the clients whose messages arrived in the round, ascending int64 [n]."""
        return self.progress.participant_ids

    @cached_property
    def run(self) -> RunFacts:
        """The facts of the run, which a callback may read before the method's own `setup`."""
        return RunFacts(loop_of(self.trainer, type(self).__name__), self.trainer)

    @cached_property
    def kinds(self) -> np.ndarray:
        """The number of each client's network in the family, int64; all 0 without a family."""
        loop = self.run.loop
        data = loop.datamodule
        if self.family is None:
            return np.zeros(loop.num_clients, np.int64)
        try:
            rng = generator(loop.seed, "family")
            return self.family.assign(data.names_or_numbers, data.client_sizes, rng)
        except ValueError as error:
            raise ConfigError(f"model.network: {error}") from error

    @property
    def num_clients(self) -> int:
        """M, the number of clients that train: all but the clients in `loop.unseen`."""
        return len(self.run.loop.population)

    @property
    def population(self) -> np.ndarray:
        """The ids of the M clients that train, in some rounds or in all, ascending int64 [M]."""
        return self.run.loop.population

    @property
    def unseen_clients(self) -> np.ndarray:
        """The ids of the clients that never train (`loop.unseen`), ascending int64."""
        return self.run.loop.unseen_clients

    @property
    def client_sizes(self) -> np.ndarray:
        """Number of training samples of every client by id, int64; `[self.population]` is [M]."""
        return self.run.loop.datamodule.client_sizes

    @property
    def seed(self) -> int:
        """The seed of the run's cohorts and sample orders, for `generator(self.seed, ...)`."""
        return self.run.loop.seed

    @property
    def max_rounds(self) -> int | None:
        """The number of rounds after which the run ends; None if that is not known beforehand."""
        return self.run.max_rounds

    def cohort(self, round_index: int) -> np.ndarray:
        """Returns the ids of the clients that train in a round (from 0), ascending int64."""
        return self.run.loop.cohort(round_index)

    @property
    def cohort_size(self) -> int:
        """The number of clients in a round; with Bernoulli sampling the expected one."""
        return self.run.loop.participation.cohort_size

    def problem_constant(self, name: str) -> float | None:
        """Returns a constant of the data module, such as `smoothness`, or None."""
        return getattr(self.run.loop.datamodule, name, None)

    def require_plain_steps(self) -> None:
        """Refuses an `optimizer` and aids of the user, for methods that need plain steps."""
        if self.optimizer_factory is not None:
            name = type(self).__name__
            raise ConfigError(f"model.optimizer: {name} takes plain local steps; leave it out")
        self.require_no_aids()

    def require_all_clients(self) -> None:
        """Refuses a run in which a round trains some of the clients only; for `check_setup`."""
        self.run.loop.participation.require_all_clients(type(self).__name__)

    def require_validation(self, reason: str) -> None:
        """Refuses a run that does not measure a validation loss; for `check_setup`.

        Args:
            reason: The argument and value that need the loss, as "penalty_schedule: plateau".
        """
        self.run.require_validation(reason)

    def require_exact_states(self, reason: str) -> None:
        """Refuses a run whose client states are stored in 16 bits; for `check_setup`.

        Args:
            reason: The argument and value that need the states as they are.
        """
        self.run.require_exact_states(reason)

    def as_stored(self, name: str, values: Tensor) -> Tensor:
        """Returns rows of a client state as they will be read: rounded with `loop.state_dtype`."""
        return self.states.store.rounded(name, values)

    def kept_rows(self, name: str, ids: np.ndarray) -> Tensor:
        """Returns the last message of each of some clients, [n, K], on every process.

        A client that has sent none yet has the initial row. Every process must call it, with the
        same ids.
        """
        return self.states.rows(KEPT + name, ids)

    def kept_ids(self, name: str) -> np.ndarray:
        """Returns the ids of the clients that have sent a kept message, ascending int64.

        Every process must call it.
        """
        return self.states.seen(KEPT + name)

    def kept_mean(self, name: str) -> Tensor:
        """Returns the mean [K] of a kept message over all M clients.

        A client that has sent none counts with the initial row. Every process must call it.
        """
        return self.states.mean(KEPT + name, self.run.loop.chunk_size)

    def iter_kept(self, name: str) -> Iterator[Tensor]:
        """Yields the last messages of this process's share of the M clients, [C, K] at a time.

        A number that is added up over them must be added up over processes as well, with
        `sum_over_processes`.
        """
        loop = self.run.loop
        count = max(1, -(-self.num_clients // loop.chunk_size))
        for ids in loop.chunks(self.population, "train", count, owned=True):
            yield self.states.store.read(KEPT + name, ids, self.device)

    def kept_models(self, ids: np.ndarray) -> dict[str, Tensor]:
        """Returns the kept messages "w" of some clients, [n, P], and "buffers", [n, B].

        These are the running statistics of the models, where `buffers: average` sends them. A
        mixture of the models has the same mixture of their statistics.
        """
        names = [name for name in ("w", "buffers") if name in self.states.messages]
        return {name: self.kept_rows(name, ids) for name in names}

    def ask_clients(self, ids: np.ndarray) -> dict[str, Tensor]:
        """Returns what `first_upload` would send now, [n, K] by name; keeps nothing.

        For `begin_evaluation`. Every process must call it, with the same ids.
        """
        store = self.states.store
        like = self.space.vector
        rows = {
            name: like.new_zeros(len(ids), len(store.initial(KEPT + name)))
            for name in self.states.messages
        }
        for clients, messages in self.first_uploads(ids):
            for name, message in messages.items():
                rows[name][torch.from_numpy(np.searchsorted(ids, clients.ids))] = message.values
        return {name: sum_over_processes(values) for name, values in rows.items()}

    def log_metric(self, name: str, value: float) -> None:
        """Adds a number to the round's row of metrics; it must be the same on every process.

        Call it in `begin_round` or `server_update`: a number that is logged between two rounds
        belongs to no row. NaN, such as the mean of nothing, leaves the cell of the round empty.

        Raises:
            ConfigError: The value is not a number, or a number of every run has this name.
        """
        if name.partition("/")[0] in OF_EVERY_RUN:
            raise ConfigError(
                f"model: log_metric({name!r}, {value!r}); every run has such a number"
            )
        try:
            value = float(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"model: log_metric({name!r}, {value!r}); the value must be a number"
            ) from error
        if not math.isnan(value):
            self._metrics[name] = value

    def new_metrics(self) -> dict[str, float]:
        """Returns where `log_metric` writes from now on: the numbers of a new round."""
        self._metrics = {}
        return self._metrics

    def log_table(self, table: str, **columns: Tensor | np.ndarray) -> None:
        """Adds rows to `<table>.csv` in the run's folder, after a first column with the round.

        Call it in `client_update` or `download_for`.

        Args:
            table: One of the class's `tables`.
            columns: A value for each row. The rows of a round are sorted by the columns from left
                to right, so that chunks and processes do not matter.

        Raises:
            ConfigError: The class has no such table.
        """
        if table not in self.tables:
            name = type(self).__name__
            raise ConfigError(
                f"model: {name} logs the table {table!r}, which nothing would write; declare it in "
                f"the class: tables = {(*self.tables, table)}"
            )
        log = current_log()
        if log is None:
            return
        rows = {}
        for name, column in columns.items():
            rows[name] = column.cpu().numpy() if isinstance(column, Tensor) else column
        log.tables.setdefault(table, []).append(rows)

    def first_uploads(self, ids: np.ndarray) -> Iterator[tuple[Clients, Mapping[str, Message]]]:
        """Yields chunks of this process's share of some clients, and what they send first."""
        raise NotImplementedError

    @property
    def store(self) -> ClientStore:
        """The rows of all client states; it exists once a run has begun."""
        return self.states.store

    @property
    def client_state_names(self) -> list[str]:
        """Names of the client states; complete once the network has been inspected in `setup`."""
        return self.states.names
