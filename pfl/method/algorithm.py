"""A federated method as a LightningModule: what Lightning calls.

`pfl/method/hooks.py` has what the author of a method writes, and the whole run as pseudo-code;
`pfl/method/tools.py` has what the author uses.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from pfl.clients import Clients
from pfl.communication import Ledger, Message
from pfl.context import RunContext
from pfl.distributed.collectives import gather
from pfl.engines.local_step import OptimizerFactory, check_server_step
from pfl.errors import ConfigError
from pfl.method import checkpoint, checks, exchange, remarks, set_up
from pfl.method.checked import checked
from pfl.method.facts import RunFacts, loop_of
from pfl.method.family import FamilySimulation, FamilyStates, MemberStates, predictions_of_members
from pfl.method.groups import ONE_THREAD
from pfl.method.hooks import Method
from pfl.method.local_training import Network
from pfl.method.naming import name_clients
from pfl.method.neighbours import check_neighbours
from pfl.method.round import run_round
from pfl.method.scoring import Evaluation, predictions
from pfl.method.transport import Compared, Pooled, Simulation, Transport, chunks_of
from pfl.parameters import Layer
from pfl.randomness import Secret
from pfl.rounds.cohort import Cohort
from pfl.scores.names import candidates
from pfl.stages.mean import Stages
from pfl.stages.private import GRADIENTS


class FederatedAlgorithm(Method):
    """A federated method: a subclass defines what a client does and what the server does.

    Subclasses write `client_update` and, where they differ from FedAvg, `download`,
    `server_update` and `personalized`. They declare what is remembered between rounds with
    `add_client_state`, `add_server_state` and `keep_messages`. See docs/add-a-method.md, and the
    head of `pfl/method/hooks.py` for the whole round.

    Args:
        network: The architecture with its initial values. It always holds the global model, so that
            no other method may have the same object.
        server_optimizer: An optimizer that takes w - mean(w_i) as the gradient of the global model
            w. null: SGD with rate 1, which replaces w by the mean.
        weighting: The clients' weights in the mean: "samples" (their numbers of training samples)
            or "uniform".
        **kwargs: The arguments of local training; see `LocalTraining`.

    Attributes:
        states: The declared client states and kept messages, with the rows of all clients.
        evaluation: The scores of the last complete evaluation; None before the first.
        progress: What the run has done so far.
        row: The last round's row of metrics.
        recorded: The last round's rows of each table by column.
        transport: Carries the messages of the run's rounds.
        stages: What acts on the messages; empty for a plain run.

    Example:
        FedAvg whose clients stop after two steps, whatever the arguments say:

        >>> from pfl.models import MLP
        >>> class TwoSteps(FederatedAlgorithm):
        ...     def client_update(self, clients, w):
        ...         v = w.repeat(len(clients), 1)
        ...         for batch in clients.batches(LocalSchedule(self.batch_size, steps=2)):
        ...             loss, g = self.oracle.gradient(v, batch, clients.buffers)
        ...             v -= self.rate_of(clients) * g
        ...             self.log_loss("train", loss, batch.counts)
        ...         return v
        >>> method = TwoSteps(MLP(64, (8,)), lr=0.05)
        >>> method.global_model.shape  # 64 * 8 + 8 + 8 * 10 + 10
        torch.Size([610])
    """

    transport: Transport
    stages: Stages
    context: RunContext
    members: Sequence[FederatedAlgorithm]

    def __init__(
        self,
        network: Network,
        *,
        server_optimizer: OptimizerFactory | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        self.weighting = weighting
        self.server_optimizer_factory = server_optimizer or partial(torch.optim.SGD, lr=1.0)
        check_server_step(self.server_optimizer_factory)
        self.evaluation: Evaluation | None = None
        self.stages = Stages((), weighting)
        self.process_threads = torch.get_num_threads()
        self._given: Transport | None = None  # what `connect` was given
        self._strict = False  # whether all hooks are checked in all rounds
        self._checked_once: set[str] = set()  # of "round" and "evaluation", what was checked
        # Of the evaluation that runs. In a list, since a module in an attribute becomes a part.
        self._passing: list[Method] = []
        self._pass: Evaluation | None = None
        self._loss_names: list[str] = []  # of the rounds so far, known to all processes
        self._rounds_apart = 1  # rounds between two scheduled evaluations
        self._loaded: dict[str, Any] | None = None
        self.members = ()
        self._server_layers = self.space.layers
        self.follows = False
        self.most_values = self.space.size

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuses a method that replaces a private function of the framework by accident."""
        super().__init_subclass__(**kwargs)
        cls.sends_first = cls.first_upload is not Method.first_upload
        private = (name for name in vars(cls) if name[0] == "_" != name[1:2])
        taken = [name for name in private if callable(getattr(FederatedAlgorithm, name, None))]
        if taken:
            raise TypeError(f"{cls.__name__}: {', '.join(taken)} belong to the framework; rename")

    # ---- what a run is given ------------------------------------------------------------------

    def connect(self, transport: Transport) -> None:
        """Has a transport carry the messages of the runs to come, in place of the simulation."""
        self._given = transport

    def enter(self, run: RunFacts) -> None:
        """Takes the facts of a run, which a callback may read before the method's own `setup`."""
        self.__dict__["run"] = run

    def of_client(self, client: int) -> FederatedAlgorithm:
        """Returns the method that has the network of a client: a member, or this one."""
        if self.family is None:
            return self
        self.make_members()
        return self.members[int(self.kinds[client])]

    def make_members(self) -> None:
        """Makes a method of the same class and arguments for each network of a family."""
        if self.family is None or self.members:
            return
        made = [self.made_with(copy.deepcopy(one)) for one in self.family.networks.values()]
        self.members = nn.ModuleList(made).to(self.space.vector)  # type: ignore[assignment]
        most = max(member.space.size for member in self.members)
        for member in self.members:
            member.join(self)
            member.most_values = most
        self.states = FamilyStates(self.states, self.members)

    def after_move(self) -> None:
        """Makes the parameters views of one vector again, also those of members with its values."""
        super().after_move()
        for member in self.members:
            if member.follows:
                member.share_model(self)

    def share_model(self, server: FederatedAlgorithm) -> None:
        """Makes the server's model this method's own, so that both move together."""
        values = server.space.vector.data
        self.space.vector.data = values
        self.space.point(self.space.parameters_of(self.network), values)

    @property
    def server_layers(self) -> list[Layer]:
        """The parameters of the server's network; a client's may have other ones."""
        return self._server_layers

    def join(self, server: FederatedAlgorithm) -> None:
        """Acts for clients with this method's network in the run of a server's method."""
        self.family = server.family
        same = self.space.layers == server.space.layers
        self.follows = same and torch.equal(self.global_model, server.global_model)
        if self.follows:
            self.share_model(server)
        self.progress = server.progress
        self._server_layers = server.space.layers
        self.states = MemberStates(self.states)
        # What the server sends to single clients, and how large its model is, the server says.
        self.__dict__["download_for"] = server.download_for
        self.__dict__["evaluation_for"] = server.evaluation_for
        self.__dict__["global_size"] = server.global_size

    def attach(self, trainer: pl.Trainer) -> None:
        """Belongs to a Trainer that neither fits nor tests, such as that of an export."""
        self.trainer = trainer

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the run, with its Trainer and its samples, of a method that is copied.

        The copy has the models, the states, and the numbers of the last round.
        """
        state = super().__getstate__()
        for name in ("run", "transport", "context"):
            state.pop(name, None)
        state["_passing"] = []
        state["_pass"] = None
        return state

    def take_secret(self, secret: Secret) -> None:
        """Draws noise and private cohorts from a key, such as that of a checkpoint."""
        self.run.loop.take_secret(secret)
        if self.run.private is not None and not self.run.private.privacy.reproducible:
            self.run.private.draw_from(secret)
        if self.run.loop.sample_privacy is not None:
            set_up.make_private(self, self.run.loop)

    def refuse_all_reads(self) -> None:
        """Has all hooks of all rounds checked strictly, as in the engine "debug"."""
        self._strict = True

    def _acting(self, what: str) -> Method:
        """Returns the method, or a view of it that checks hooks, for a round or an evaluation.

        The first of each is checked, and all of a private run.
        """
        if what in self._checked_once and not self._strict and self.run.private is None:
            return self
        self._checked_once.add(what)
        return checked(self, strict=self._strict)

    # ---- what Lightning calls: set-up ---------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Checks method, network, loss, data and Trainer against each other, before anything."""
        checks.check_complete(self, Method)
        set_up.refuse_shared_network(self)
        trainer = self.trainer
        loop = loop_of(trainer, type(self).__name__)
        set_up.share_secret(loop)
        self.enter(RunFacts(loop, trainer))
        self.process_threads = torch.get_num_threads()
        set_up.check_precision(trainer, loop)
        remarks.tell_conversions(loop)
        if not loop.val_dataloader():
            trainer.limit_val_batches = 0  # or Lightning warns of an empty loader
        device = trainer.strategy.root_device
        self.make_members()
        self.to(device)  # Lightning would do this later, but the network is inspected there here
        # What 64-true makes a float64 network of later, would have been stored in float32.
        final = trainer.precision != "64-true" or self.space.vector.dtype == torch.float64
        precision = trainer.precision_plugin.forward_context
        alone = self.family is None
        probe = set_up.inspect_network(self, loop, device, precision, store=final and alone)
        self.make_late_states()
        largest = self
        for member in self.members:
            member.enter(self.run)
            set_up.inspect_network(member, loop, device, precision, store=False)
            member.make_late_states()
            if member.space.size > largest.space.size:
                largest = member
        self._make_stages()
        set_up.plan_chunks(largest, loop, probe)
        if stage == "fit":
            self._rounds_apart = trainer.check_val_every_n_epoch or 1
            remarks.tell_large_columns(loop, self.network)
            remarks.tell_doubt(self.run.private, loop)
        self._check_fit()
        allowed = set_up.rounds_within_budget(self.run.private, self.max_rounds)
        if allowed is not None:
            trainer.fit_loop.max_epochs = allowed
        self._strict = self._strict or self.oracle.engine.strict
        self._checked_once = set()
        self._loss_names = []
        self.transport = self._given or self._simulation()
        self.transport.set_up(self, self.stages, loop)
        set_up.keep_network(self)

    def begin_apart(self, run: RunFacts, client: int, *, store: bool) -> None:
        """Prepares the method of one client that trains apart from the server.

        Args:
            run: The facts of the run, as the client knows them.
            client: The client's id, whose samples are tried.
            store: Whether the network's frozen part may run once.
        """
        self.enter(run)
        set_up.inspect_network(self, run.loop, self.device, nullcontext, client, store=store)
        self._make_stages()
        self._check_fit()
        self.allocate()

    def _make_stages(self) -> None:
        """Makes the stages of the run, and declares their states."""
        self.stages = set_up.stages_of(self, self.run.loop, self.run.private)
        for method in (self, *self.members):
            set_up.declare_states(method, self.stages)

    def _check_fit(self) -> None:
        """Checks that the method, the stages and the run fit each other."""
        loop = self.run.loop
        self.context = self.run.context(self.device)
        if self.needs_all_clients:
            self.require_all_clients()
        set_up.check_by_client(self, loop)
        set_up.check_patience(self, loop)
        if self.class_weights is not None:
            self.weighted_classes = set_up.classes_to_weigh(self)
        self.check_setup()
        for member in self.members:
            member.context = self.context
            member.check_setup()
        set_up.set_up_stages(self, self.stages, self.context)
        if loop.neighbours is not None:
            for method in (self, *self.members):
                check_neighbours(method)
        set_up.make_private(self, loop)

    def _simulation(self) -> Transport:
        """Returns what carries the messages of a run that was given nothing else."""
        if self.family is not None:
            return FamilySimulation(self, self.members, self.kinds)
        if self.pooled:
            return Pooled()
        if self.oracle.engine.strict:
            return Compared()
        return Simulation()

    def allocate(self) -> None:
        """Allocates threads, and rows for the clients' states."""
        set_up.allocate(self, self.run.loop, self.context, self.process_threads)
        for member in self.members:
            set_up.allocate_member(member, self.groups.threads)

    def on_fit_start(self) -> None:
        """Takes the states over from the checkpoint, and on a GPU chooses the fastest engine."""
        chosen = None
        before = None
        if self._loaded is not None:
            chosen = self._loaded.get("engine")
            before = chosen or self._loaded.get("ran_with")
        self.on_validation_start()
        for method in self.members or [self]:
            set_up.choose_engine(method, self.run.loop, self.device, chosen)
        set_up.tell_engine(self.oracle, before)

    def on_validation_start(self) -> None:
        """Allocates the clients' states, or takes them over from the checkpoint."""
        self.allocate()
        self.run.loop.read_ahead_from(self.store)
        if self._loaded is not None:
            trainer = self.trainer
            checkpoint.restore_run(self, self._loaded, trainer.global_rank, trainer.world_size)
            secret = checkpoint.secret_of(self, self._loaded)
            if secret is not None:
                self.take_secret(secret)
            self._loaded = None

    on_test_start = on_predict_start = on_validation_start

    def teardown(self, stage: str) -> None:
        """Gives the process back the number of threads that it had, and the engine's memory."""
        self.groups.threads.close()
        self.groups.use(ONE_THREAD)
        self.oracle.allocate_replicas(0)
        self.oracle.engine.release()
        for member in self.members:
            member.teardown(stage)
        torch.set_num_threads(self.process_threads)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.server_optimizer_factory([self.space.vector])

    # ---- what Lightning calls: rounds ---------------------------------------------------------

    def training_step(self, cohort: Cohort, batch_idx: int = 0) -> None:
        """Runs a round."""
        method = self._acting("round")
        with self.in_full_precision():
            done = run_round(
                method, cohort, self.transport, self.stages, self.context, self._loss_names
            )
        self.row = done.row
        self.recorded = done.tables
        self._log_row(self.row, "train/loss")

    def first_uploads(self, ids: np.ndarray) -> Iterator[tuple[Clients, Mapping[str, Message]]]:
        """Yields chunks of this process's share of some clients, and what they send first."""
        yield from self.transport.first_messages(self, ids)

    # ---- what Lightning calls: evaluation -----------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Starts an evaluation pass; `evaluation` keeps the previous scores until it finishes."""
        self._passing = [self._acting("evaluation")]
        method = self._passing[0]
        loop = self.run.loop
        if self._pass is None or self._pass.loop is not loop or self._pass.device != self.device:
            self._pass = self.transport.evaluation(method)
        self._pass.begin(self.transport.receiver(method))
        method.begin_evaluation()

    def validation_step(self, clients: Clients, batch_idx: int = 0) -> None:
        """Computes the global and personalized scores of a chunk of clients."""
        assert self._pass is not None
        with self.in_full_precision():
            if self.store.slow and self.device.type == "cpu":  # the whole chunk was read ahead
                self.states.read(clients)
            try:
                self._pass.update(self._passing[0], clients)
            except Exception as error:
                after = f"in the evaluation after round {self.rounds}"
                name_clients(error, self, self.run.loop, clients, after)
                raise

    def on_validation_epoch_end(self) -> None:
        """Logs the scores, once all clients have theirs."""
        assert self._pass is not None
        method = self._passing.pop()
        row = {"round": self.rounds, **self._pass.finish()}
        self.evaluation = self._pass
        self.row = {**self.row, **row}
        if self.trainer.state.fn != "fit" or self.trainer.sanity_checking:
            # `validate` and `test` return what Lightning's own log has.
            numbers = {name: float(value) for name, value in row.items()}
            self.log_dict(numbers, on_step=False, on_epoch=True, batch_size=1)
            return
        chosen = self.run.loop.select_by
        names = candidates(row, "val", chosen) or candidates(row, "test", chosen)
        self._log_row(row, *map(str, names[:1]))
        # The last round is evaluated in any case; a run that continues from there must not differ
        # from a run that did not end.
        scheduled = not getattr(self.trainer, "finishing", False)
        if scheduled and (self.trainer.current_epoch + 1) % self._rounds_apart == 0:
            method.after_evaluation(row)

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, clients: Clients, batch_idx: int = 0) -> dict[str, np.ndarray]:
        method = self._acting("prediction")
        with self.in_full_precision():
            if self.family is None:
                self.load_state(clients)
                return predictions(method, clients)
            receive = self.transport.receiver(self)
            return predictions_of_members(self, receive, self.stages, clients)

    # ---- what callbacks, tests and notebooks use ----------------------------------------------

    def client_rows(self, name: str, ids: np.ndarray) -> Tensor:
        """Returns the rows [n, width] of a client state, on every process, which must all call it.

        For a look at a run from outside; the hooks of a method cannot call it.
        """
        return self.states.rows(name, ids)

    def iter_clients(self, split: Literal["train", "val", "test"] = "train") -> Iterator[Clients]:
        """Yields this process's share of the M clients in chunks, with their states.

        For a look at a run from outside; the hooks of a method cannot call it.
        """
        receive = self.transport.receiver(self)
        for clients in chunks_of(self, self.run.loop, self.population, split):
            receive(clients)
            exchange.begin(self, self.stages, clients)
            yield clients

    def load_state(self, clients: Clients) -> None:
        """Reads states, running statistics and what the server would send now into `clients`."""
        if not clients.received:
            self.transport.receiver(self)(clients)
        exchange.begin(self, self.stages, clients)

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
            return self.progress.ledger
        ledger = Ledger(self.run.loop.num_clients)
        ledger.load_state_dict(*gather(self.progress.ledger.state_dict()))
        return ledger

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
        self.make_members()
        checkpoint.check_body(self, self._loaded)
        self.load_late_states(checkpoint_["state_dict"])
        if "run" in self.__dict__:  # else `load_from_checkpoint`, which loads the model only
            # Lightning loads weights before 64-true converts the module: they would lose digits.
            self.trainer.precision_plugin.convert_module(self)
            checkpoint.check(self, checkpoint_)
            if self.trainer.state.fn == "fit":
                checkpoint.take_server_arguments(self, checkpoint_)

    def _log_row(self, row: dict[str, float], *shown: str) -> None:
        """Passes numbers of a round to callbacks, with all their digits; bars show some of them.

        `self.log` would round the numbers to float32 and take milliseconds a round.
        """
        tensors = {k: torch.tensor(float(v), dtype=torch.float64) for k, v in row.items()}
        self.trainer.callback_metrics.update(tensors)
        self.trainer.logged_metrics.update(tensors)
        bar = {name: float(row[name]) for name in shown if name in row}
        self.trainer.progress_bar_metrics.update(bar)
