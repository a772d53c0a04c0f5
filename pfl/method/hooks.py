"""What the author of a method writes: the hooks of a run, and what they do if they are not written.

A run in pseudo-code, with the hooks that a method writes in CAPITALS. The list of stages is empty
in a plain run:

    CHECK_SETUP()                                         # once, before anything runs
    for round in run:                                     # one epoch of Lightning's Trainer
        cohort = loop.cohort(round)                       # a function of (seed, round)
        for clients in cohort:                            # only if the method has FIRST_UPLOAD
            keep(FIRST_UPLOAD(clients))                   # what clients send before they receive
        BEGIN_ROUND(round)                                # the server reads kept messages
        download = stages.down(DOWNLOAD())                # to every client, counted by the ledger
        for clients in transport.train(cohort, download): # groups of C clients, by threads
            clients.received = download + DOWNLOAD_FOR(clients.ids)
            clients.state = their rows of each declared state
            messages = CLIENT_UPDATE(clients, clients.received["w"])
            # only what was received, the clients' states and samples, and constants are read
            messages = stages.sent(messages)              # compression, attackers, statistics
            if the messages arrive:                       # else the new states are forgotten
                commit(clients.state)
                for message in messages:                  # counted by the ledger
                    if kept:                  keep it for each client
                    elif reduce == "rows":    collect it, [participants, K]
                    else:                     add it to the weighted sum
        received = sums over all processes / weights, rows by client id
        SERVER_UPDATE(stages.read(received))              # changes the global model
        optimizer.step()                                  # moves it where a gradient was left
        TRAIN_SERVER(received)                            # trains on, from the mean
        if it is time:                                    # trainer.check_val_every_n_epoch
            BEGIN_EVALUATION()
            for clients in everyone:
                clients.received = DOWNLOAD() + EVALUATION_FOR(clients.ids)
                score the global model                    # if the method has one
                score PERSONALIZED(clients)               # if the method has them
                fine-tune from ADAPTATION_START(clients) and score
                score NEWCOMER(clients) for clients that never trained
            AFTER_EVALUATION(row)

`run_round` (round.py) is the part from `for clients in cohort` to `TRAIN_SERVER`, `Evaluation`
(scoring.py) the last part; `Transport` (transport.py) says who trains and how messages travel, and
`States` (states.py) holds and commits the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.communication import ToSend, dense
from pfl.method.tools import MethodTools


class Method(MethodTools):
    """A method: what its clients do, and what its server does.

    Every function here may be written by a subclass; here they are those of FedAvg, or do nothing.
    A private run and the first round of every run check what the functions read and return
    (`pfl.method.checked`).
    """

    _told_size: int | None = None

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
    losses: ClassVar[tuple[str, ...]] = ("train",)
    """Names of the losses that the method logs: a server of real parties takes no others."""
    needs_all_clients: ClassVar[bool] = False
    """Whether every round must have the messages of all clients."""
    reads_other_samples: ClassVar[bool] = False
    """Whether networks also get other samples than the clients', so that all of them must run."""
    takes_client_rates: ClassVar[bool] = True
    """Whether clients may have learning rates of their own (`rate_of`, `loop.by_client`)."""
    reads_products: ClassVar[bool] = False
    """Whether the server reads the mean of the products B A of LoRA's factors."""
    weighting: Literal["samples", "uniform"]
    follows: bool
    """Whether a member of a family has the server's network and values, and moves with them."""
    most_values: int
    """The number of values of the largest network that a client has, P where all have one."""
    members: Sequence[Method]
    """The methods of the clients' networks, where clients have networks of their own."""

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

    def train_server(self, received: dict[str, Tensor]) -> None:
        """Trains at the server once the server's optimizer has moved the model; here nothing.

        The global model is that of the round here, and may be trained on (FedDF); so may a server
        state, such as a generator (FedGen). `descend_at_server` takes the steps. Every process
        calls it, with the same messages, and must come to the same values: draw with
        `generator(self.seed, "purpose", self.rounds)`. It is not called without clients.

        Args:
            received: What `server_update` has got.
        """

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

    # ---- what follows from it -----------------------------------------------------------------

    def global_size(self) -> int:
        """Returns `parameters_global`, which a party has been told by the server."""
        if self._told_size is not None:
            return self._told_size
        return self.parameters_global()

    def tell_global_size(self, numbers: int) -> None:
        """Says how many numbers describe the server's global model, where this is a party."""
        self._told_size = numbers
