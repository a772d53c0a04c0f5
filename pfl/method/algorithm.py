"""What a federated method is made of; its rounds, evaluations and states are parts that it has.

A run in pseudo-code, with the hooks that a method writes in CAPITALS:

    CHECK_SETUP()                                         # once, before anything runs
    for round in run:                                     # one epoch of Lightning's Trainer
        cohort = loop.cohort(round)                       # a function of (seed, round)
        for clients in cohort:                            # only if the method has FIRST_UPLOAD
            keep(FIRST_UPLOAD(clients))                   # what clients send before they receive
        BEGIN_ROUND(round)                                # the server reads kept messages
        common = DOWNLOAD()                               # to every client, counted by the ledger
        for clients in chunks(cohort):                    # groups of C clients, by threads
            clients.state = their rows of each declared state
            clients.received = common + DOWNLOAD_FOR(clients.ids)
            messages = CLIENT_UPDATE(clients, clients.received["w"])
            # only what was received, the clients' states and samples, and constants are read
            if the messages arrive:                       # else the new states are forgotten
                commit(clients.state)
                for message in messages:                  # counted by the ledger
                    if kept:                  keep it for each client
                    elif reduce == "rows":    collect it, [participants, K]
                    else:                     add it to the weighted sum
        received = sums over all processes / weights, rows by client id
        SERVER_UPDATE(received)                           # changes the global model
        optimizer.step()                                  # moves it where a gradient was left
        if it is time:                                    # trainer.check_val_every_n_epoch
            BEGIN_EVALUATION()
            for clients in everyone:
                clients.received = DOWNLOAD()
                score the global model                    # if the method has one
                score PERSONALIZED(clients)               # if the method has them
                fine-tune from ADAPTATION_START(clients) and score
                score NEWCOMER(clients) for clients that never trained
            AFTER_EVALUATION(row)

`Round` (round.py) is the part from `for clients in cohort` to `optimizer.step`, `Evaluation`
(scoring.py) the last part, `States` (states.py) holds and commits the rows, and `RunFacts`
(facts.py) has what is known before the run begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from pfl.clients import Clients
from pfl.clients.store import ClientStore
from pfl.communication import Ledger, Message, ToSend, dense
from pfl.distributed.collectives import gather, sum_over_processes
from pfl.engines.local_step import OptimizerFactory, check_server_step
from pfl.errors import ConfigError, require_one_of
from pfl.method import checkpoint, checks, set_up, sides
from pfl.method.client_side import first_messages
from pfl.method.facts import RunFacts, loop_of
from pfl.method.groups import ONE_THREAD
from pfl.method.local_training import LocalTraining, Network
from pfl.method.neighbours import check_neighbours
from pfl.method.round import Round, receiver_now
from pfl.method.scoring import Evaluation, predictions
from pfl.method.states import GRADIENTS, KEPT, States

# The first words of the numbers that a row of `metrics.csv` has in every run.
OF_EVERY_RUN = ("round", "participants", "dropped", "train", "val", "test", "comm", "parameters")


class FederatedAlgorithm(LocalTraining):
    """A federated method: a subclass defines what a client does and what the server does.

    Subclasses write `client_update` and, where they differ from FedAvg, `download`,
    `server_update` and `personalized`. They declare what is remembered between rounds with
    `add_client_state`, `add_server_state` and `keep_messages`. See docs/add-a-method.md, and the
    head of this file for the whole round.

    Args:
        network: The architecture with its initial values. It always holds the global model.
        server_optimizer: An optimizer that takes w - mean(w_i) as the gradient of the global model
            w. null: SGD with rate 1, which replaces w by the mean.
        weighting: The clients' weights in the mean: "samples" (their numbers of training samples)
            or "uniform".
        **kwargs: The arguments of local training; see `LocalTraining`.

    Attributes:
        participants: How many clients' messages arrived in the round, set before `server_update`;
            in a private run the expected number of clients in a round.
        states: The declared client states and kept messages, with the rows of all clients.
        round: The current round, or the last one.
        server_states: The names of the server states.
        evaluation: The scores of the last complete evaluation; None before the first.
        ledger: Every client's bytes; it exists once a run has begun.
        row, recorded: The last round's row of metrics, and its rows of each table by column.
        samples_seen: Number of sample gradients so far.
        bytes_down, bytes_up: Bytes that the server has sent and received so far.

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

    has_global: ClassVar[bool] = True
    """True if there is one model for everyone that is evaluated."""
    has_personalized: ClassVar[bool] = False
    """True if `personalized` gives every client a model of its own, which is evaluated."""
    keeps_model: ClassVar[bool] = False
    """True if clients continue the models that they trained last, with their statistics."""
    personal_buffers: ClassVar[Literal["initial", "received"] | None] = None
    """Where clients train the personalized model beside the model that they send: how it begins.

    The personalized model then has statistics of its own, in `clients.personal`. "initial": they
    begin as the initial model's; "received": as those of the model that the client receives.
    """
    pooled: ClassVar[bool] = False
    """True if one model is trained on the training samples of all clients, and nothing is sent.

    In every round `client_update` then gets a single client, which owns the samples of all clients
    that train; the cohort does not matter, unless it is empty, and nobody fails or is slow.
    """
    buffer_size: int | None = None
    """After how many messages the server moves, in virtual time; None: after a whole cohort's."""
    sends_first: ClassVar[bool] = False
    """Whether clients send something before they receive anything: `first_upload` is written."""
    tables: ClassVar[tuple[str, ...]] = ()
    """Names of the tables to which the method adds rows with `log_table`."""

    round: Round
    ledger: Ledger

    def __init__(
        self,
        network: Network,
        *,
        server_optimizer: OptimizerFactory | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        require_one_of("weighting", weighting, "samples", "uniform")
        self.weighting = weighting
        self.server_optimizer_factory = server_optimizer or partial(torch.optim.SGD, lr=1.0)
        check_server_step(self.server_optimizer_factory)
        self.states = States(self)
        self.evaluation: Evaluation | None = None
        self.participants, self.participant_ids = 0, np.empty(0, np.int64)
        self.samples_seen = 0.0
        self.bytes_down = self.bytes_up = 0
        self.row: dict[str, float] = {}
        self.recorded: dict[str, dict[str, np.ndarray]] = {}
        self.rounds_compared = False  # the engine "debug" compares in its first round
        self.server_states: set[str] = set()
        self._late_states: dict[str, Callable[[], Tensor | nn.Module]] = {}  # made in `setup`
        self._loaded_states: dict[str, Tensor] = {}  # of a checkpoint, before that
        self._pass: Evaluation | None = None
        self._rounds_apart = 1  # rounds between two scheduled evaluations
        self._loaded: dict[str, Any] | None = None
        self.process_threads = torch.get_num_threads()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuses a method that replaces a private function of the framework by accident."""
        super().__init_subclass__(**kwargs)
        cls.sends_first = cls.first_upload is not FederatedAlgorithm.first_upload
        private = (name for name in vars(cls) if name[0] == "_" != name[1:2])
        if taken := [name for name in private if callable(getattr(FederatedAlgorithm, name, None))]:
            raise TypeError(f"{cls.__name__}: {', '.join(taken)} belong to the framework; rename")

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
        self.server_states.add(name)
        if isinstance(initial, Tensor):
            self.register_buffer(name, initial)
        elif isinstance(initial, nn.Module):
            self.register_module(name, initial.to(self.space.vector).requires_grad_(False))
        else:
            self._late_states[name] = initial

    def _make_late_states(self) -> None:
        """Makes the server states that are not there yet, with the values of a checkpoint."""
        for name, initial in self._late_states.items():
            if not hasattr(self, name):
                self.add_server_state(name, initial())
        if self._loaded_states:
            self.load_state_dict({**self.state_dict(), **self._loaded_states})
            self._loaded_states.clear()

    def add_constant(self, name: str, value: Tensor) -> None:
        """Declares a tensor that server and clients know from the start; it becomes `self.<name>`.

        It follows from the arguments, such as a mask of the layers that are shared, and never
        changes.
        """
        self.register_buffer(name, value)

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
        """
        self.states.declare(name, initial, sparse)

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
        """
        self.states.keep(name, initial)

    # ---- what a method writes -----------------------------------------------------------------

    def check_setup(self) -> None:
        """Checks that the run fits the method, once before anything runs; here nothing.

        The facts of the run are known here, and the network has been inspected. Raise a
        `ConfigError` for what does not fit, or call `require_all_clients`, `require_validation` or
        `require_exact_states`.
        """

    def first_upload(self, clients: Clients) -> ToSend:
        """Returns what C clients send before they receive anything in a round; here nothing.

        The messages must be declared with `keep_messages`. A client that fails later in the round
        has sent them.

        Args:
            clients: The clients' data and states, which must not change.
        """
        return {}

    def begin_round(self, round_index: int) -> None:
        """Computes what the server needs before a round (from 0); here nothing.

        Every process calls it once a round, so that sums over processes are possible here.
        """

    def download(self) -> ToSend:
        """Returns what the server sends to every client of a round: messages [K] by name.

        Here the global model. The message "w" is the `w` of `client_update`; all messages are in
        `clients.received`. A single message has the name "w".
        """
        return dense(self.global_model)

    def download_for(self, ids: np.ndarray) -> ToSend:
        """Returns what the server sends to each of some clients alone; here nothing.

        Args:
            ids: C clients of the round's cohort, int64 [C].

        Returns:
            Messages [C, K] by name, a row for each client, such as a model of its own ("w").
        """
        return {}

    def evaluation_for(self, ids: np.ndarray) -> ToSend:
        """Returns what the server sends to each of some clients alone for an evaluation.

        As `download_for`, but for any clients, newcomers as well; here nothing.
        """
        return {}

    def client_update(self, clients: Clients, w: Tensor) -> ToSend:
        """Trains C clients for a round and returns what they send.

        It reads nothing of the server but what the clients have received.

        Args:
            clients: The clients' data; `clients.received`, the messages of the server by name; and
                `clients.state`, their rows of every declared client state. The rows that are there
                afterwards are kept for the client's next round, once its message has arrived.
            w: The received message "w": the global model [P], or the clients' own [C, P]. Without
                such a message an empty tensor.

        Returns:
            The clients' models [C, P], or other messages [C, K] by name.
        """
        raise NotImplementedError  # never reached: `setup` refuses a method without it

    def server_update(self, received: dict[str, Tensor]) -> None:
        """Updates the global model; here by a step of the server's optimizer.

        A method that sets `global_model` itself leaves `space.vector.grad` alone.

        Args:
            received: For each message its weighted mean [K] over the cohort, or its rows
                [participants, K] in the order of `participant_ids`, as `Message.reduce` says.
        """
        self.space.vector.grad = self.global_model - received["w"]

    def personalized(self, clients: Clients) -> Tensor:
        """Returns the clients' personalized models, [C, P].

        They are computed from `clients.state` and `clients.received`, what `download` would send
        now, and must change neither.
        """
        raise NotImplementedError(f"{type(self).__name__} has no personalized models")

    def adaptation_start(self, clients: Clients) -> Tensor:
        """Returns each client's best model, from which fine-tuning in an evaluation begins, [C, P].

        Here the personalized model, or the received one where the method has no other.
        """
        if self.has_personalized:
            return self.personalized(clients)
        return clients.received["w"].expand(len(clients), -1)

    def newcomer(self, clients: Clients) -> Tensor:
        """Returns the first models of clients that never trained, [C, P].

        Here the global model, or the personalized one, with client states at their initial values,
        where the method has no global model. It may read what the server has.
        """
        if self.has_global:
            return self.global_model.expand(len(clients), -1)
        return self.personalized(clients)

    def begin_evaluation(self) -> None:
        """Computes what the server needs before an evaluation; here nothing.

        Every process calls it, so that sums over processes are possible here.
        """

    def after_evaluation(self, row: dict[str, float]) -> None:
        """Acts on the scores of a scheduled evaluation during `fit`; here nothing.

        Args:
            row: The evaluation's numbers, such as `row["val/personalized/loss"]`, the same on every
                process.
        """

    @property
    def personalization_penalty(self) -> float | None:
        """λ of min mean_i [f_i(w_i) + λ/2 |w_i - w|^2] over w and all w_i, which the method solves.

        Infinity: one model for everyone. 0: every client alone. None: the method solves another
        problem, so that no reference solution is known.
        """
        return math.inf

    def parameters_global(self) -> int:
        """Returns how many numbers describe the global model: P, or fewer if it has a structure."""
        return self.space.size

    def parameters_personalized(self, clients: Clients, w: Tensor) -> Tensor:
        """Returns how many numbers describe each personalized model w [C, P], int64 [C]."""
        return torch.full((len(clients),), self.space.size)

    # ---- what a method uses -------------------------------------------------------------------

    @property
    def global_model(self) -> Tensor:
        """The global model, [P]; write into it with `copy_`. Clients read what they receive."""
        sides.refuse_on_client(self, "global_model")
        return self.space.vector.detach()  # `.data` would not count writes, which `guard` asks for

    @property
    def global_buffers(self) -> Tensor:
        """The running statistics of the global model, [B]; empty for a network without any."""
        sides.refuse_on_client(self, "global_buffers")
        return self.oracle.buffers.read(self.network, self.space.vector.detach())

    def __getattr__(self, name: str) -> Any:
        """Returns a tensor or module; refuses a server state in the code of a client."""
        if name in self.__dict__.get("server_states", ()):
            sides.refuse_on_client(self, name)
        return super().__getattr__(name)

    @property
    def rounds(self) -> int:
        """Number of rounds that are over; in `client_update` use `clients.round`."""
        return self._rounds

    @rounds.setter
    def rounds(self, rounds: int) -> None:
        self._rounds = rounds

    @property
    def participant_ids(self) -> np.ndarray:
        """The ids of the clients whose messages arrived in the round, ascending int64 [n]."""
        if "run" in self.__dict__ and self.run.private is not None:
            sides.refuse_private(self, "participant_ids")
        return self._participant_ids

    @participant_ids.setter
    def participant_ids(self, ids: np.ndarray) -> None:
        self._participant_ids = ids

    @cached_property
    def run(self) -> RunFacts:
        """The facts of the run, which a callback may read before the method's own `setup`."""
        return RunFacts(loop_of(self.trainer, type(self).__name__), self.trainer)

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
        sides.refuse_on_client(self, "cohort")
        return self.run.loop.cohort(round_index)

    @property
    def cohort_size(self) -> int:
        """The number of clients in a round; with Bernoulli sampling the expected one."""
        return self.run.loop.participation.cohort_size

    def problem_constant(self, name: str) -> float | None:
        """Returns a constant of the data module, such as `smoothness`, or None."""
        return getattr(self.run.loop.datamodule, name, None)

    def require_plain_steps(self) -> None:
        """Refuses an `optimizer` of the user, for methods with local steps of their own."""
        if self.optimizer_factory is not None:
            name = type(self).__name__
            raise ConfigError(f"model.optimizer: {name} takes plain local steps; leave it out")

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
        sides.refuse_on_client(self, "kept_rows")
        return self.states.rows(KEPT + name, ids)

    def kept_ids(self, name: str) -> np.ndarray:
        """Returns the ids of the clients that have sent a kept message, ascending int64.

        Every process must call it.
        """
        sides.refuse_on_client(self, "kept_ids")
        return self.states.seen(KEPT + name)

    def kept_mean(self, name: str) -> Tensor:
        """Returns the mean [K] of a kept message over all M clients.

        A client that has sent none counts with the initial row. Every process must call it.
        """
        sides.refuse_on_client(self, "kept_mean")
        return self.states.mean(KEPT + name)

    def iter_kept(self, name: str) -> Iterator[Tensor]:
        """Yields the last messages of this process's share of the M clients, [C, K] at a time.

        A number that is added up over them must be added up over processes as well, with
        `sum_over_processes`.
        """
        sides.refuse_on_client(self, "iter_kept")
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
        names, store, like = self.states.messages, self.states.store, self.space.vector
        rows = {name: like.new_zeros(len(ids), len(store.initial(KEPT + name))) for name in names}
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
        if hasattr(self, "round") and not math.isnan(value):
            self.round.totals.metrics[name] = value

    def log_table(self, table: str, **columns: Tensor | np.ndarray) -> None:
        """Adds rows to `<table>.csv` in the run's folder, after a first column with the round.

        Call it in `client_update` or `download_for`.

        Args:
            table: One of the class's `tables`.
            columns: A value for each row. The rows of a round are sorted by the columns from left
                to right, so that chunks and processes do not matter.
        """
        rows = [c.cpu().numpy() if isinstance(c, Tensor) else c for c in columns.values()]
        if (log := sides.current_log()) is not None:
            log.tables.setdefault(table, []).append(dict(zip(columns, rows, strict=True)))

    # ---- what callbacks, tests and notebooks use ----------------------------------------------

    @property
    def store(self) -> ClientStore:
        """The rows of all client states; it exists once a run has begun."""
        return self.states.store

    @property
    def client_state_names(self) -> list[str]:
        """Names of the client states; complete once the network has been inspected in `setup`."""
        return self.states.names

    def client_rows(self, name: str, ids: np.ndarray) -> Tensor:
        """Returns the rows [n, width] of a client state, on every process, which must all call it.

        For a look at a run from outside; the hooks of a method cannot call it.
        """
        sides.refuse_on_server(self, "client_rows")
        sides.refuse_on_client(self, "client_rows")
        return self.states.rows(name, ids)

    def iter_clients(self, split: Literal["train", "val", "test"] = "train") -> Iterator[Clients]:
        """Yields this process's share of the M clients in chunks, with their states.

        For a look at a run from outside; the hooks of a method cannot call it.
        """
        sides.refuse_on_server(self, "iter_clients")
        yield from self.states.chunks(self.population, split, receiver_now(self))

    def load_state(self, clients: Clients) -> None:
        """Reads states, running statistics and what the server would send now into `clients`."""
        if not clients.received:
            receiver_now(self)(clients)
        self.states.load(clients)

    def sample_epsilons(self) -> np.ndarray | None:
        """Returns the ε of each client's samples, [M], in all processes; None without it."""
        privacy = self.run.loop.sample_privacy
        if privacy is None:
            return None
        everyone = np.arange(self.run.loop.num_clients)
        gradients = self.states.rows(GRADIENTS, everyone)[:, 0].cpu().numpy()
        return privacy.epsilons(self.client_sizes, gradients, self.batch_size)

    def client_bytes(self) -> Ledger:
        """Returns every client's bytes over all processes. Every process must call it."""
        if self.trainer.world_size == 1:
            return self.ledger
        ledger = Ledger(self.run.loop.num_clients)
        ledger.load_state_dict(*gather(self.ledger.state_dict()))
        return ledger

    # ---- what Lightning calls: set-up ---------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Checks method, network, loss, data and Trainer against each other, before anything."""
        checks.check_complete(self, FederatedAlgorithm)
        loop, trainer = loop_of(self.trainer, type(self).__name__), self.trainer
        self.run = RunFacts(loop, trainer)
        self.process_threads = torch.get_num_threads()
        set_up.check_precision(trainer, loop)
        if not loop.val_dataloader():
            trainer.limit_val_batches = 0  # or Lightning warns of an empty loader
        device = trainer.strategy.root_device
        self.to(device)  # Lightning would do this later, but the network is inspected there here
        # What 64-true makes a float64 network of later, would have been stored in float32.
        final = trainer.precision != "64-true" or self.space.vector.dtype == torch.float64
        context = trainer.precision_plugin.forward_context
        probe = set_up.inspect_network(self, loop, device, context, store=final)
        self._make_late_states()
        set_up.plan_chunks(self, loop, probe)
        if stage == "fit":
            self._rounds_apart = trainer.check_val_every_n_epoch or 1
        self.check_setup()
        checks.check_aggregation(self)
        if loop.neighbours is not None:
            check_neighbours(self)
        set_up.make_private(self, loop)
        set_up.end_within_budget(self)
        if self.oracle.engine.strict:
            sides.refuse_all_reads(self)

    def on_fit_start(self) -> None:
        """Allocates the clients' states, or takes them over from the checkpoint."""
        loop = self.run.loop
        set_up.allocate(self, loop)
        loop.store = self.store
        if self._loaded is not None:
            trainer = self.trainer
            checkpoint.restore(self, self._loaded, trainer.global_rank, trainer.world_size)
            self._loaded = None

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def teardown(self, stage: str) -> None:
        """Gives the process back the number of threads that it had."""
        self.threads.close()
        self.groups.threads = ONE_THREAD
        self.oracle.allocate_replicas(0)
        torch.set_num_threads(self.process_threads)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.server_optimizer_factory([self.space.vector])

    # ---- what Lightning calls: rounds ---------------------------------------------------------

    def training_step(self, clients: Clients, batch_idx: int = 0) -> None:
        """Trains one chunk of the round's cohort; after the last chunk the server updates."""
        with self.in_full_precision():
            if clients.first:
                self.round = self.new_round(clients.round)
                self.round.begin()
            self.round.train(clients)
            if clients.last:
                self.row = self.round.finish()
                self._log_row(self.row)
                self.recorded = self.round.totals.gathered_tables(self.tables)

    # A server whose clients are elsewhere replaces these three.

    def new_round(self, index: int) -> Round:
        """Returns the round with an index, from 0."""
        return Round(self, index)

    def first_uploads(self, ids: np.ndarray) -> Iterator[tuple[Clients, Mapping[str, Message]]]:
        """Yields chunks of this process's share of some clients, and what they send first."""
        for clients in self.states.chunks(ids, "train"):
            yield clients, first_messages(self, clients)

    def new_evaluation(self) -> Evaluation:
        """Returns an object that collects the scores of evaluation passes."""
        return Evaluation(self.run.loop, self.device)

    # ---- what Lightning calls: evaluation -----------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Starts an evaluation pass; `evaluation` keeps the previous scores until it finishes."""
        loop = self.run.loop
        if self._pass is None or self._pass.loop is not loop or self._pass.device != self.device:
            self._pass = self.new_evaluation()
        self._pass.begin(receiver_now(self))
        with sides.on_side("server", "begin_evaluation"):
            self.begin_evaluation()

    def validation_step(self, clients: Clients, batch_idx: int = 0) -> None:
        """Computes the global and personalized scores of a chunk of clients."""
        assert self._pass is not None
        with self.in_full_precision():
            if self.store.slow and self.device.type == "cpu":  # the whole chunk was read ahead
                self.states.load(clients)
            self._pass.update(self, clients)

    def on_validation_epoch_end(self) -> None:
        """Logs the scores, once all clients have theirs."""
        assert self._pass is not None
        row = {"round": self.rounds, **self._pass.finish()}
        self.evaluation = self._pass
        self.row = {**self.row, **row}
        if self.trainer.state.fn != "fit" or self.trainer.sanity_checking:
            # `validate` and `test` return what Lightning's own log has.
            numbers = {name: float(value) for name, value in row.items()}
            self.log_dict(numbers, on_step=False, on_epoch=True, batch_size=1)
            return
        self._log_row(row)
        # The last round is evaluated in any case; a run that continues from there must not differ
        # from a run that did not end.
        scheduled = not getattr(self.trainer, "finishing", False)
        if scheduled and (self.trainer.current_epoch + 1) % self._rounds_apart == 0:
            with sides.on_side("server", "after_evaluation"):
                private = self.run.private is not None
                self.after_evaluation(checks.HiddenScores() if private else row)

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, clients: Clients, batch_idx: int = 0) -> dict[str, np.ndarray]:
        with self.in_full_precision():
            self.load_state(clients)
            return predictions(self, clients)

    # ---- what Lightning calls: checkpoints ----------------------------------------------------

    def on_save_checkpoint(self, checkpoint_: dict[str, Any]) -> None:
        """Adds the clients' states and all counts to a checkpoint.

        Raises:
            ConfigError: A round has begun and is not over. A run that went on from the checkpoint
                would train some of the round's clients twice.
        """
        # Our own counters cannot tell a callback's `on_train_epoch_start` from its `on_train_end`:
        # in both, no chunk of the next round has been trained.
        progress = self.trainer.fit_loop.epoch_progress.current
        if progress.ready > progress.completed == self.trainer.global_step:  # a round is a step
            raise ConfigError(
                f"trainer.save_checkpoint: round {progress.ready} is not over, and no run could go "
                f"on from here; save once it is, as in on_train_epoch_end"
            )
        checkpoint_["federated"] = checkpoint.save(self, self.client_bytes())

    def on_load_checkpoint(self, checkpoint_: dict[str, Any]) -> None:
        """Refuses a checkpoint of another run; states are restored once the device is known."""
        self._loaded = checkpoint_.get("federated")
        checkpoint.check_body(self, self._loaded)
        saved = checkpoint_["state_dict"]
        for key in [key for key in saved if key.partition(".")[0] in self._late_states]:
            if not hasattr(self, key.partition(".")[0]):
                self._loaded_states[key] = saved.pop(key)
            elif key in self._late_states:  # another run's settings may give it another shape
                setattr(self, key, saved[key].to(getattr(self, key), copy=True))
        if "run" in self.__dict__:  # else `load_from_checkpoint`, which loads the model only
            # Lightning loads weights before 64-true converts the module: they would lose digits.
            self.trainer.precision_plugin.convert_module(self)
            checkpoint.check(self, checkpoint_)

    def _log_row(self, row: dict[str, float]) -> None:
        """Passes a round's numbers to callbacks and loggers, with all their digits.

        `self.log` would round the numbers to float32 and take milliseconds a round. The loggers'
        step is the round, from 0.
        """
        numbers = {name: float(value) for name, value in row.items()}
        tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}
        self.trainer.callback_metrics.update(tensors)
        self.trainer.logged_metrics.update(tensors)
        for logger in self.trainer.loggers:
            logger.log_metrics({**numbers, "epoch": self.trainer.current_epoch}, self.rounds - 1)
