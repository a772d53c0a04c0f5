"""What Lightning needs of a federated method: set-up, evaluation, checkpoints."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from torch import Tensor, nn

from models.classifier import Classifier
from pfl.clients import Clients
from pfl.clients.memory_tiers import DEVICE_SHARE
from pfl.clients.store import ClientStore
from pfl.communication import Ledger
from pfl.distributed.collectives import gather
from pfl.engines.base import EngineName
from pfl.engines.batch import default_loss
from pfl.engines.memory import clients_that_fit
from pfl.engines.oracle import Oracle
from pfl.engines.threads import ClientThreads
from pfl.errors import ConfigError, require
from pfl.method.checkpoint import check, refuse_part_of_a_round, restore, save
from pfl.parameters import ParameterSpace
from pfl.rounds.evaluation import Evaluation, predictions
from pfl.rounds.loop import FederatedLoop

# Steps of smaller models take milliseconds: a second thread inside of them costs more than it
# gives, many times more on a machine with other work to do.
ONE_THREAD_PARAMETERS = 1 << 18
ONE_THREAD = ClientThreads(1)
CHUNK_FLOATS = 1 << 26  # of one [C, P] matrix where `clients_at_once` is left open: 256 MiB
MEMORY_SHARE = 0.8  # of a GPU's free memory; the rest is for what libraries take as they go

R = TypeVar("R")

Network: TypeAlias = Classifier | nn.Module
"""Any network. The command line looks for a short name, such as MLP, among our own first."""


class FederatedModule(LightningModule):
    """A global model, what is remembered beside it, and how both are evaluated and saved.

    `FederatedAlgorithm`, from which methods derive, adds the round; its docstring explains the
    arguments.
    """

    has_global: ClassVar[bool] = True
    """Whether there is one model for everyone that is evaluated."""
    has_personalized: ClassVar[bool] = False
    """Whether `personalized` gives every client a model of its own."""
    tables: ClassVar[tuple[str, ...]] = ()
    """Names of the tables that the method `record`s rows of."""

    def __init__(
        self,
        network: Network,
        batch_size: int | None,
        buffers: Literal["average", "local"],
        loss: nn.Module | None,
        engine: EngineName,
    ) -> None:
        super().__init__()
        if not isinstance(network, nn.Module):
            raise ConfigError(f"model.network: {network!r}; it must be a module, such as MLP(64)")
        require("batch_size", batch_size, batch_size is None or batch_size >= 1, "at least 1")
        require("buffers", buffers, buffers in ("average", "local"), "average or local")
        self.automatic_optimization = False
        self.network = network
        self.space = ParameterSpace(network)
        self.oracle = Oracle(network, self.space, loss or default_loss, engine)
        self.batch_size, self.buffer_policy = batch_size, buffers
        self.rounds = 0
        self.row: dict[str, float] = {}
        self.recorded: dict[str, dict[str, np.ndarray]] = {}
        self.samples_seen = 0.0
        self.evaluation: Evaluation
        self._pass: Evaluation
        self.store: ClientStore
        self.ledger: Ledger
        self._client_states: dict[str, tuple[Callable[[], Tensor], bool]] = {}
        self._loaded: dict[str, Any] | None = None
        self._threads = torch.get_num_threads()
        self.threads = ONE_THREAD
        self._limits = {"training": sys.maxsize, "evaluation": sys.maxsize}  # of groups

    # ---- models and what is remembered beside them --------------------------------------------

    @property
    def global_model(self) -> Tensor:
        """The global model, [P]; write into it with `copy_`."""
        return self.space.vector.data

    def add_server_state(self, name: str, initial: Tensor) -> None:
        """Declare a tensor that the server keeps between rounds; it becomes `self.<name>`."""
        self.register_buffer(name, initial)

    def add_client_state(
        self, name: str, initial: Callable[[], Tensor] | float = 0.0, *, sparse: bool = False
    ) -> None:
        """Declare what each client keeps between rounds; its rows are in `clients.state[name]`.

        Args:
            initial: What it starts as for every client: a number for P copies of it, or a function
                that gives the row, called when training begins (`lambda: self.global_model`).
            sparse: Most of its values will be zero; only the others are stored.
        """
        if callable(initial):
            self._client_states[name] = initial, sparse
        else:
            self._client_states[name] = (
                lambda: torch.full_like(self.global_model, initial),
                sparse,
            )

    @property
    def client_state_names(self) -> list[str]:
        """Names of what clients keep between rounds; known once the network has been tried."""
        buffers = self.oracle.buffers.size > 0 and self.buffer_policy == "local"
        return [*self._client_states, *["buffers"] * buffers]

    def personalized(self, clients: Clients) -> Tensor:
        """The clients' personalized models [C, P], from `clients.state` and the global model."""
        raise NotImplementedError(f"{type(self).__name__} has no personalized models")

    @property
    def personalization_penalty(self) -> float | None:
        """λ of min mean_i [f_i(w_i) + λ/2 |w_i - w|^2] over w and all w_i, which the method solves.

        Infinite: one model for everyone. 0: every client alone. None: it solves something else.
        """
        return math.inf

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        """What a round costs clients of these sizes, relative to each other."""
        return sizes

    def iter_clients(self, split: Literal["train", "val", "test"]) -> Iterator[Clients]:
        """This process's share of all clients in chunks, with what they remember."""
        loop, everyone = self._loop, np.arange(self._loop.num_clients)
        count = -(-len(everyone) // loop.chunk_size)
        for ids in loop.chunks(everyone, split, count, owned=True):
            clients = Clients(ids, self.rounds, loop.client_data(self.device), split)
            self.load_state(clients)
            yield clients

    @contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Without autograd and autocast, both of which are each thread's own.

        Only the oracle runs in the Trainer's precision: server algebra in bf16 would be noise.
        """
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            yield

    def parameters_global(self) -> int:
        """How many numbers the global model takes."""
        return self.space.size

    def parameters_personalized(self, clients: Clients, w: Tensor) -> Tensor:
        """How many numbers each personalized model w [C, P] takes, [C]."""
        return torch.full((len(clients),), self.space.size)

    # ---- evaluation ---------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Begin a pass over all clients; the last one counts until this one is through."""
        known, wanted = getattr(self, "_pass", None), (self._loop.num_clients, self.device)
        if known is None or (known.num_clients, known.device) != wanted:
            self._pass = Evaluation(*wanted)
        self._pass.begin()

    def validation_step(self, clients: Clients, batch_idx: int = 0) -> None:
        """Global and personalized scores of a chunk of clients."""
        with self.in_full_precision():
            if self.store.slow and self.device.type == "cpu":  # read ahead, as a whole
                self.load_state(clients)
            self._pass.update(self, clients)

    def on_validation_epoch_end(self) -> None:
        """Log the scores, once all clients are through."""
        row = {"round": self.rounds, **self._pass.finish()}
        self.evaluation = self._pass
        self.row = {**self.row, **row}
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self._log_round(row)
        else:  # `validate` and `test` return what Lightning's own log has
            self._log(row)

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, clients: Clients, batch_idx: int = 0) -> dict[str, np.ndarray]:
        """Predictions for each client's test samples by each kind of model that the method has."""
        with self.in_full_precision():
            self.load_state(clients)
            return predictions(self, clients)

    # ---- set-up and checkpoints ---------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Check network, loss, data and Trainer against each other, before anything runs."""
        loop, trainer = self._loop, self.trainer
        self._threads = torch.get_num_threads()
        if trainer.precision in ("16-mixed", "16-true", "bf16-true"):
            raise ConfigError(
                f"trainer.precision: {trainer.precision!r} scales losses or keeps the models "
                f"themselves in 16 bits; use bf16-mixed, 32-true or 64-true"
            )
        loop.cost = self.cost
        if not loop.val_dataloader():
            trainer.limit_val_batches = 0  # or Lightning warns of an empty loader
        device = trainer.strategy.root_device
        self.to(device)  # Lightning would do it later, but the network is tried there here
        data = loop.client_data(device)
        owner = int(loop.datamodule.client_sizes.argmax())
        few = Clients(np.array([owner]), 0, data, dtype=self.space.vector.dtype)
        batch = next(few.batches(self._probe_size(loop)))
        self.oracle.inspect(
            batch.inputs[0],
            batch.targets[0],
            loop.datamodule.num_classes,
            precision=trainer.precision_plugin.forward_context,
        )
        loop.stateful = bool(self.client_state_names)
        # The same for all processes, or they would not agree who trains whom.
        loop.chunk_size = min(gather(loop.clients_at_once or self._clients_that_fit(few)))

    def _clients_that_fit(self, one: Clients) -> int:
        """How many clients are trained together, judged by one with many samples."""
        if self.device.type != "cuda":
            return max(1, CHUNK_FLOATS // self.space.size)
        # Received, own and momentum; sent; and everything remembered, before, after and read ahead.
        vectors = 4 + 3 * len(self._client_states)
        share = MEMORY_SHARE * (1 - DEVICE_SHARE * bool(self._client_states)) / self._loop.sharing
        return clients_that_fit(self.oracle, next(one.batches(self.batch_size)), vectors, share)

    def _probe_size(self, loop: FederatedLoop) -> int:
        """Two samples, or one where some client's last batch is that small (BatchNorm minds)."""
        sizes = loop.datamodule.client_sizes
        left = sizes if self.batch_size is None else sizes % self.batch_size
        return 1 if self.batch_size == 1 or (left[sizes > 0] == 1).any() else 2

    def on_fit_start(self) -> None:
        """Allocate what clients remember, with the final device and dtype, or take it over."""
        self.oracle.to(self.device, self.space.vector.dtype)
        if self.threads is ONE_THREAD and self.device.type == "cpu":
            self.threads = ClientThreads(self.oracle.allocate_replicas(self._threads))
        if self.device.type == "cpu" and self.space.size < ONE_THREAD_PARAMETERS:
            torch.set_num_threads(1)
        total = self._loop.num_clients
        if not hasattr(self, "store") or self.store.num_clients != total:
            self.store, self.ledger = self._loop.client_store(self.device), Ledger(total)
            self.bytes_down = self.bytes_up = 0
            for name, (initial, sparse) in self._client_states.items():
                self.store.declare(name, initial(), dtype=self._loop.state_dtype, sparse=sparse)
            if "buffers" in self.client_state_names:
                buffers = self.oracle.buffers.read(self.network, self.global_model)
                self.store.declare("buffers", buffers)
        self._loop.store = self.store
        if self._loaded is not None:
            restore(self, self._loaded)
            self._loaded = None

    def teardown(self, stage: str) -> None:
        """Leave the process with as many threads as it had."""
        self.threads.close()
        self.threads = ONE_THREAD
        self.oracle.allocate_replicas(0)
        torch.set_num_threads(self._threads)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def in_groups(
        self,
        clients: Clients,
        work: Callable[[Clients], R],
        size: int,
        doing: Literal["training", "evaluation"] = "training",
    ) -> Iterator[tuple[Clients, R]]:
        """Groups of at most `size` clients, each with what `work` makes of it; by threads if any.

        Where a GPU's memory does not hold a group, its halves take its place, without what `load_state`
        gave it, and no group is larger from then on.
        """
        groups = clients.groups(max(1, min(size, self._limits[doing])))
        if self.threads.count > 1:
            yield from zip(groups, self.threads.map(work, groups), strict=True)
            return
        while groups:
            group = groups.pop(0)
            try:
                made = work(group)
            except RuntimeError as error:
                if len(group) == 1 or not is_oom_error(error):
                    raise
            else:
                yield group, made
                continue
            # Here, since the error kept all that the attempt had made.
            most = self._limits[doing] = -(-len(group) // 2)
            rank_zero_warn(
                f"The memory of {self.device} does not hold {len(group)} clients at a time in "
                f"{doing}; going on with {most}",
                category=UserWarning,
            )
            self.store.disable_prefetch()
            self.oracle.release()
            if self.device.type == "cuda":
                garbage_collection_cuda()
            again = replace(group, state={}, buffers=None)
            groups = [part for one in (again, *groups) for part in one.groups(most)]

    def load_state(self, clients: Clients) -> None:
        """Give a chunk its clients' states and buffers."""
        clients.dtype = self.space.vector.dtype
        clients.state = {
            name: self.store.read(name, clients.ids, self.device) for name in self.store.names
        }
        clients.buffers = clients.state.get("buffers")
        if self.oracle.buffers.size and clients.buffers is None:
            buffers = self.oracle.buffers.read(self.network, self.global_model)
            clients.buffers = buffers.repeat(len(clients), 1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what Lightning does not know of."""
        refuse_part_of_a_round(self.trainer)
        checkpoint["federated"] = save(self, self._loop.datamodule.partition.hash)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another run; the rest waits until the device is known."""
        self._loaded = checkpoint.get("federated")
        if self._trainer is not None:  # else: load_from_checkpoint, which wants the model only
            # Lightning loads weights before 64-true converts the module: they would lose digits.
            self.trainer.precision_plugin.convert_module(self)
            check(self, self._loaded, self._loop.datamodule.partition.hash)

    def client_bytes(self) -> Ledger:
        """Bytes of every client, over all processes; the ledger itself if there is only one.

        Every process must call it.
        """
        if self.trainer.world_size == 1:
            return self.ledger
        ledger = Ledger(self._loop.num_clients)
        ledger.load_state_dict(*gather(self.ledger.state_dict()))
        return ledger

    def _log_round(self, row: dict[str, float]) -> None:
        """Give a round's numbers to callbacks and loggers, with all their digits.

        What `self.log` would do, which rounds them to float32 and takes milliseconds a round.
        """
        numbers = {name: float(value) for name, value in row.items()}
        tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}
        self.trainer.callback_metrics.update(tensors)
        self.trainer.logged_metrics.update(tensors)
        step = self.trainer.fit_loop.epoch_loop._batches_that_stepped  # as Lightning counts
        for logger in self.trainer.loggers:
            logger.log_metrics({**numbers, "epoch": self.trainer.current_epoch}, step)

    def _log(self, row: dict[str, float]) -> None:
        self.log_dict(
            {k: float(v) for k, v in row.items()}, on_step=False, on_epoch=True, batch_size=1
        )

    @property
    def _loop(self) -> FederatedLoop:
        loop = getattr(self.trainer, "datamodule", None)
        if not isinstance(loop, FederatedLoop):
            raise ConfigError(
                f"datamodule: {type(self).__name__} trains with a FederatedLoop around the data; "
                f"pass datamodule=FederatedLoop(your_datamodule, clients_per_round=...)"
            )
        return loop

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FederatedModule:
        super()._apply(fn, recurse)
        self.space.bind(self.network)  # moving a module gives its parameters new storage
        return self
