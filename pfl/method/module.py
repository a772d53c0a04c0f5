"""The state of a federated method: models, what clients remember, and the engine that runs them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from torch import Tensor, nn

from models.classifier import Classifier
from pfl._private import MovableModule
from pfl.clients import Clients, LocalSchedule
from pfl.clients.memory_tiers import DEVICE_SHARE
from pfl.clients.store import ClientStore
from pfl.communication import Ledger
from pfl.distributed.collectives import gather
from pfl.engines.base import EngineName
from pfl.engines.batch import default_loss
from pfl.engines.memory import clients_that_fit
from pfl.engines.oracle import Oracle
from pfl.engines.threads import ClientThreads
from pfl.errors import ConfigError, require, require_one_of
from pfl.parameters import ParameterSpace
from pfl.rounds.loop import FederatedLoop

# Local steps of smaller models take milliseconds. A second thread within such a step costs more
# than it gains, many times more on a machine with other work to do.
ONE_THREAD_PARAMETERS = 1 << 18
ONE_THREAD = ClientThreads(1)
CHUNK_FLOATS = 1 << 26  # of one [C, P] matrix if `clients_at_once` is left open: 256 MiB
MEMORY_SHARE = 0.8  # of a GPU's free memory; the rest is for what libraries take as they go

SCALED = ("16-mixed", "16")  # precisions that scale losses

R = TypeVar("R")

Network: TypeAlias = Classifier | nn.Module
"""Any network. The command line looks for a short name, such as MLP, among our own first."""


class FederatedModule(MovableModule):
    """A global model, the clients' states, and the engine that runs models of many clients.

    `FederatedRun` adds what happens in a run beside training, `FederatedAlgorithm` the rounds. The
    docstring of `FederatedAlgorithm` explains the arguments.

    Attributes:
        network: The architecture. Its parameters are views of `global_model`.
        space: The `ParameterSpace`, which maps parameters by name to the P floats of a model.
        oracle: Gives losses and gradients of many clients' models.
        store: The rows of all client states; it exists once a run has begun.
        ledger: Every client's bytes; it exists once a run has begun.
        rounds: Number of rounds that are over.
        samples_seen: Number of sample gradients so far.
        bytes_down, bytes_up: Bytes that the server has sent and received so far.
    """

    has_global: ClassVar[bool] = True
    """True if there is one model for everyone that is evaluated."""
    has_personalized: ClassVar[bool] = False
    """True if `personalized` gives every client a model of its own, which is evaluated."""
    personal_buffers: ClassVar[bool] = False
    """True if clients train the personalized model beside the model that they send.

    The personalized model then has statistics of its own, in `clients.personal`.
    """
    tables: ClassVar[tuple[str, ...]] = ()
    """Names of the tables to which the method adds rows with `log_table`."""

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
        require_one_of("buffers", buffers, "average", "local")
        self.automatic_optimization = False
        self.network = network
        self.space = ParameterSpace(network)
        self.oracle = Oracle(network, self.space, loss or default_loss, engine)
        self.batch_size, self.buffer_policy = batch_size, buffers
        self.rounds = 0
        self.samples_seen = 0.0
        self.bytes_down = self.bytes_up = 0
        self.store: ClientStore
        self.ledger: Ledger
        self._client_states: dict[str, tuple[Callable[[], Tensor], bool]] = {}
        self._threads = torch.get_num_threads()
        self.threads = ONE_THREAD
        self._limits = {"training": sys.maxsize, "evaluation": sys.maxsize}  # of groups

    # ---- models and states --------------------------------------------------------------------

    @property
    def global_model(self) -> Tensor:
        """The global model, [P]; write into it with `copy_`."""
        return self.space.vector.detach()  # `.data` would not count writes, which `guard` asks for

    def add_server_state(self, name: str, initial: Tensor) -> None:
        """Declares a tensor that the server keeps between rounds; it becomes `self.<name>`."""
        self.register_buffer(name, initial)

    def shared_tensors(self) -> dict[str, Tensor]:
        """Returns the global model and the server states, by the names that a method has for them.

        All clients use these tensors: `client_update` and `personalized` must not change them.
        """
        states = {f"self.{name}": state for name, state in self.named_buffers(recurse=False)}
        return {"self.global_model": self.global_model, **states}

    def add_client_state(
        self, name: str, initial: Callable[[], Tensor] | float = 0.0, *, sparse: bool = False
    ) -> None:
        """Declares what each client keeps between rounds; its rows are in `clients.state[name]`.

        Args:
            name: A name that is not yet taken.
            initial: The first value for every client: a number, for P copies of it, or a function
                that returns the row [width], called when training begins
                (`lambda: self.global_model`).
            sparse: Most values will be zero; only the others are stored.
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
        """Names of the client states; complete once the network has been inspected in `setup`."""
        kept = {"buffers": self.buffer_policy == "local", "personal_buffers": self.personal_buffers}
        buffers = [name for name, is_kept in kept.items() if is_kept and self.oracle.buffers.size]
        return [*self._client_states, *buffers]

    def personalized(self, clients: Clients) -> Tensor:
        """Returns the clients' personalized models, [C, P].

        They are computed from `clients.state` and the global model, and must change neither.
        """
        raise NotImplementedError(f"{type(self).__name__} has no personalized models")

    @property
    def personalization_penalty(self) -> float | None:
        """λ of min mean_i [f_i(w_i) + λ/2 |w_i - w|^2] over w and all w_i, which the method solves.

        Infinity: one model for everyone. 0: every client alone. None: the method solves another
        problem, so that no reference solution is known.
        """
        return math.inf

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the relative costs of a round for clients with these numbers of samples, [C]."""
        return sizes

    def parameters_global(self) -> int:
        """Returns how many numbers describe the global model: P, or fewer if it has a structure."""
        return self.space.size

    def parameters_personalized(self, clients: Clients, w: Tensor) -> Tensor:
        """Returns how many numbers describe each personalized model w [C, P], int64 [C]."""
        return torch.full((len(clients),), self.space.size)

    @contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Turns autograd and autocast off inside, in the thread that enters.

        Only the oracle runs in the Trainer's precision: server algebra in bf16 would be noise.
        """
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            yield

    # ---- set-up -------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Checks network, loss, data and Trainer against each other, before anything runs."""
        loop, trainer = self._loop, self.trainer
        self._threads = torch.get_num_threads()
        if trainer.precision in (*SCALED, "16-true", "bf16-true"):
            raise refused_precision(trainer.precision)
        if trainer.precision == "64-true" and (rounded := loop.datamodule.rounded_arrays):
            rank_zero_warn(
                f"trainer.precision: 64-true, but {type(loop.datamodule).__name__} keeps "
                f"{', '.join(rounded)} as float32, with 7 digits; TensorDataModule keeps all",
                category=UserWarning,
            )
        loop.cost = self.cost
        if not loop.val_dataloader():
            trainer.limit_val_batches = 0  # or Lightning warns of an empty loader
        device = trainer.strategy.root_device
        self.to(device)  # Lightning would do this later, but the network is inspected there here
        data = loop.client_data(device)
        largest = int(loop.datamodule.client_sizes.argmax())
        probe = Clients(np.array([largest]), 0, data, dtype=self.space.vector.dtype)
        batch = next(probe.batches(LocalSchedule(self._probe_size(loop))))
        self.oracle.inspect(
            batch.inputs[0],
            batch.targets[0],
            loop.datamodule.num_classes,
            precision=trainer.precision_plugin.forward_context,
        )
        if loop.metrics:
            outputs = self.oracle.predict(self.global_model, batch.inputs[0]).cpu()
            loop.metrics.check(*self.oracle.runner.predicted(outputs, batch.targets[0].cpu()))
        loop.stateful = bool(self.client_state_names)
        # The same for all processes, or they would not agree on who trains whom.
        loop.chunk_size = min(gather(loop.clients_at_once or self._clients_that_fit(probe)))

    def _clients_that_fit(self, probe: Clients) -> int:
        """Returns how many clients to train together, judged by one client with many samples."""
        if self.device.type != "cuda":
            return max(1, CHUNK_FLOATS // self.space.size)
        # The received model, the client's own, momentum and the message; and each client state
        # three times: before and after the update, and read ahead.
        vectors = 4 + 3 * len(self._client_states)
        share = MEMORY_SHARE * (1 - DEVICE_SHARE * bool(self._client_states)) / self._loop.sharing
        batch = next(probe.batches(LocalSchedule(self.batch_size)))
        return clients_that_fit(self.oracle, batch, vectors, share)

    def _probe_size(self, loop: FederatedLoop) -> int:
        """Returns 2 samples, or 1 if some client has a batch of one, which BatchNorm refuses."""
        sizes = loop.datamodule.client_sizes
        left = sizes if self.batch_size is None else sizes % self.batch_size
        return 1 if self.batch_size == 1 or (left[sizes > 0] == 1).any() else 2

    def on_fit_start(self) -> None:
        """Allocates the clients' states, with the final device and dtype."""
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
            buffers = self.oracle.buffers.read(self.network, self.global_model)
            if "buffers" in self.client_state_names:
                self.store.declare("buffers", buffers)
            if "personal_buffers" in self.client_state_names:  # NaN: no personal training yet
                self.store.declare("personal_buffers", torch.full_like(buffers, torch.nan))
        self._loop.store = self.store

    def teardown(self, stage: str) -> None:
        """Gives the process back the number of threads that it had."""
        self.threads.close()
        self.threads = ONE_THREAD
        self.oracle.allocate_replicas(0)
        torch.set_num_threads(self._threads)

    # ---- chunks and groups of clients ---------------------------------------------------------

    def in_groups(
        self,
        clients: Clients,
        work: Callable[[Clients], R],
        size: int,
        doing: Literal["training", "evaluation"] = "training",
    ) -> Iterator[tuple[Clients, R]]:
        """Yields groups of at most `size` clients with the result of `work`, by threads if any.

        Where a GPU's memory does not hold a group, the group is halved, its clients' states are
        loaded again, and no later group is larger.

        Args:
            clients: A chunk of clients.
            work: What is done with each group.
            size: The largest group.
            doing: What `work` does; training and evaluation have limits of their own.
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
        """Reads the states and buffers of a chunk of clients into `clients`."""
        clients.dtype = self.space.vector.dtype
        clients.state = {
            name: self.store.read(name, clients.ids, self.device) for name in self.store.names
        }
        clients.buffers = clients.state.get("buffers")
        if self.oracle.buffers.size and clients.buffers is None:
            buffers = self.oracle.buffers.read(self.network, self.global_model)
            clients.buffers = buffers.repeat(len(clients), 1)
        own = clients.state.get("personal_buffers")
        if own is not None and clients.buffers is not None:
            clients.state["personal_buffers"] = torch.where(own.isnan(), clients.buffers, own)

    @property
    def _loop(self) -> FederatedLoop:
        loop = getattr(self.trainer, "datamodule", None)
        if not isinstance(loop, FederatedLoop):
            raise ConfigError(
                f"datamodule: {type(self).__name__} trains with a FederatedLoop around the data; "
                f"pass datamodule=FederatedLoop(your_datamodule, clients_per_round=...)"
            )
        return loop

    def after_move(self) -> None:
        """Makes the network's parameters views of one vector again, after they were moved."""
        self.space.bind(self.network)


def refused_precision(precision: Any) -> ConfigError:
    """Returns the error about a precision in which methods would not be what they are."""
    return ConfigError(
        f"trainer.precision: {precision!r} scales losses or keeps the models themselves in 16 "
        f"bits; use bf16-mixed, 32-true or 64-true"
    )
