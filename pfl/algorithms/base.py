"""What every federated method shares: the round, the server, the checkpoint, the evaluation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from models.classifier import Classifier
from pfl.checkpoint import check, restore, save
from pfl.clients import Clients, ClientStore
from pfl.communication import Ledger, Message, dense
from pfl.errors import ConfigError, require
from pfl.evaluation import Evaluation, predictions
from pfl.local import LocalOptimizer, OptimizerFactory, check_elementwise
from pfl.loop import FederatedLoop
from pfl.oracle import Engine, Oracle, default_loss
from pfl.parameters import ParameterSpace
from pfl.strategy import gather

# Steps of smaller models take well under a millisecond: a second thread costs more than it gives,
# and many times more on a machine with other work to do.
ONE_THREAD_PARAMETERS = 1 << 18
CHUNK_FLOATS = 1 << 26  # of one [C, P] matrix where `clients_at_once` is left open: 256 MiB


Network: TypeAlias = Classifier | nn.Module
"""Any network. The command line looks for a short name, such as MLP, among our own first."""


class FederatedAlgorithm(LightningModule):
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
        engine: How the network is run: "loop", "vmap" or "auto".
    """

    has_global: ClassVar[bool] = True
    """Whether there is one model for everyone that is evaluated."""
    has_personalized: ClassVar[bool] = False
    """Whether `personalized` gives every client a model of its own."""

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
        engine: Engine = "auto",
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        require("lr", lr, lr > 0, "positive")
        require("lr_decay", lr_decay, lr_decay > 0, "positive")
        require("weight_decay", weight_decay, weight_decay >= 0, "at least 0")
        require("local_epochs", local_epochs, local_epochs >= 1, "at least 1")
        require("local_steps", local_steps, local_steps is None or local_steps >= 1, "at least 1")
        require("batch_size", batch_size, batch_size is None or batch_size >= 1, "at least 1")
        require("weighting", weighting, weighting in ("samples", "uniform"), "samples or uniform")
        require("buffers", buffers, buffers in ("average", "local"), "average or local")
        self.network = network
        self.space = ParameterSpace(network)
        self.lr, self.lr_decay, self.weight_decay = lr, lr_decay, weight_decay
        self.local_epochs, self.local_steps = local_epochs, local_steps
        self.batch_size, self.weighting, self.buffer_policy = batch_size, weighting, buffers
        self.optimizer_factory = optimizer
        self.server_optimizer_factory = server_optimizer or partial(torch.optim.SGD, lr=1.0)
        if optimizer is not None:
            check_elementwise(optimizer([nn.Parameter(torch.zeros(1, 1))]))
        self.oracle = Oracle(network, self.space, loss or default_loss, engine)
        self._threads = torch.get_num_threads()
        self.rounds = 0
        self.row: dict[str, float] = {}
        self.samples_seen = 0.0
        self.evaluation: Evaluation
        self.store: ClientStore
        self.ledger: Ledger
        self._client_states: dict[str, Callable[[], Tensor]] = {}
        self._loaded: dict[str, Any] | None = None

    # ---- what a method writes -----------------------------------------------------------------

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

    def personalized(self, clients: Clients) -> Tensor:
        """The clients' personalized models [C, P], from `clients.state` and the global model."""
        raise NotImplementedError(f"{type(self).__name__} has no personalized models")

    def parameters_global(self) -> int:
        """How many numbers the global model takes."""
        return self.space.size

    def parameters_personalized(self, clients: Clients, w: Tensor) -> Tensor:
        """How many numbers each personalized model w [C, P] takes, [C]."""
        return torch.full((len(clients),), self.space.size)

    # ---- what a method uses -------------------------------------------------------------------

    @property
    def global_model(self) -> Tensor:
        """The global model, [P]; write into it with `copy_`."""
        return self.space.vector.data

    def add_server_state(self, name: str, initial: Tensor) -> None:
        """Declare a tensor that the server keeps between rounds; it becomes `self.<name>`."""
        self.register_buffer(name, initial)

    def add_client_state(self, name: str, initial: Callable[[], Tensor] | float = 0.0) -> None:
        """Declare what each client keeps between rounds; its rows are in `clients.state[name]`.

        Args:
            initial: What it starts as for every client: a number for P copies of it, or a function
                that gives the row, called when training begins (`lambda: self.global_model`).
        """
        if callable(initial):
            self._client_states[name] = initial
        else:
            self._client_states[name] = lambda: torch.full_like(self.global_model, initial)

    def report(self, name: str, value: float) -> None:
        """Add a number to this round's row of metrics; it must be the same on every process."""
        self._reported[name] = value

    def learning_rate(self, round: int) -> float:
        """The local learning rate of a round (from 0)."""
        return self.lr * self.lr_decay**round

    def local_sgd(
        self,
        clients: Clients,
        start: Tensor,
        direction: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        at: Callable[[Tensor], Tensor] | None = None,
        prox: Callable[[Tensor, float], Tensor] | None = None,
        epochs: int | None = None,
        name: str = "train",
    ) -> Tensor:
        """Local training: v <- prox(v - lr * direction(v, g)), g the gradient at `at(v)`.

        Args:
            start: [P] for all clients or [C, P].
            direction: Of v [C, P] and g [C, P]; None: g itself.
            at: Where the gradient is taken; None: at v.
            prox: Applied after each step with the learning rate; None: nothing.
            epochs: Instead of the method's `local_epochs` and `local_steps`.
            name: Keys the order of samples, and names the logged loss `<name>/loss`.

        Returns:
            v after the local steps, [C, P]. Clients without samples keep their start.
        """
        v = start.expand(len(clients), self.space.size).clone()
        lr = self.learning_rate(clients.round)
        optimizer = LocalOptimizer(v, lr, self.weight_decay, self.optimizer_factory)
        steps = self.local_steps if epochs is None else None
        booked = self._losses.setdefault(name, v.new_zeros(2, dtype=torch.float64))
        for batch in clients.batches(self.batch_size, epochs or self.local_epochs, steps, name):
            loss, g = self.oracle.gradient(at(v) if at else v, batch, clients.buffers)
            optimizer.step(direction(v, g) if direction else g, batch.clients)
            if prox:
                rows = v[: batch.clients]
                rows.copy_(prox(rows, lr))
            counts = torch.tensor(batch.counts, dtype=torch.float64, device=loss.device)
            booked += torch.stack([loss.double() @ counts, counts.sum()])
        return v

    # ---- the round ----------------------------------------------------------------------------

    def training_step(self, clients: Clients, batch_idx: int = 0) -> None:
        """One chunk of the round's cohort; with the last one the server's step."""
        # Only the oracle runs in the Trainer's precision: server algebra in bf16 would be noise.
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            if clients.first:
                self._begin_round()
            # An empty chunk runs too where it is the first: it gives the shapes of the sums.
            if len(clients) or not self._sums:
                self._train(clients)
            if clients.last:
                self._finish_round()

    def _begin_round(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._losses: dict[str, Tensor] = {}
        self._reported: dict[str, float] = {}
        self._counts = np.zeros(4)  # weight, clients, bytes down, bytes up
        self._message = self.download()

    def _train(self, clients: Clients) -> None:
        self._attach(clients)
        sent = self.client_update(clients, self._message.values)
        messages = sent if isinstance(sent, dict) else {"w": sent}
        messages = {k: m if isinstance(m, Message) else dense(m) for k, m in messages.items()}
        down, up = self._message.nbytes, sum(m.nbytes for m in messages.values())
        if clients.buffers is not None and self.buffer_policy == "average":
            messages["buffers"] = dense(clients.buffers)
            down, up = down + messages["buffers"].nbytes, up + messages["buffers"].nbytes
        elif clients.buffers is not None:
            clients.state["buffers"] = clients.buffers
        for name in self.store.names:
            self.store.write(name, clients.ids, clients.state[name])
        weight = clients.sizes if self.weighting == "samples" else np.ones(len(clients))
        weights = torch.from_numpy(weight).to(self.global_model)
        for name, message in messages.items():
            total = weights @ message.values.to(weights.dtype)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        before = self._bytes_booked()
        self.ledger.add(clients.ids, down, up)
        self._counts += [weight.sum(), len(clients), *(self._bytes_booked() - before)]

    def _bytes_booked(self) -> np.ndarray:
        return np.array([self.ledger.downlink.sum(), self.ledger.uplink.sum()], np.float64)

    def _finish_round(self) -> None:
        counts = self._reduce(torch.from_numpy(self._counts).to(self.device))
        weight, clients, down, up = counts.tolist()
        self.participants = int(clients)
        if weight > 0:
            mean = {name: self._reduce(total) / weight for name, total in self._sums.items()}
            if not all(total.isfinite().all() for total in mean.values()):
                raise ConfigError(
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
        self.bytes_down += int(down)
        self.bytes_up += int(up)
        self.row = {
            "round": self.rounds,
            **self._mean_losses(),
            "comm/uplink_bytes": self.bytes_up,
            "comm/downlink_bytes": self.bytes_down,
            "clients": self.participants,
            **self._reported,
        }
        self._log(self.row)

    def _mean_losses(self) -> dict[str, float]:
        means = {}
        for name, entry in self._losses.items():
            total, samples = self._reduce(entry).tolist()
            if samples:
                means[f"{name}/loss"] = total / samples
            self.samples_seen += samples
        return means

    def _reduce(self, values: Tensor) -> Tensor:
        """Sum over processes; every process takes part, also one without clients."""
        return self.trainer.strategy.reduce(values, reduce_op="sum")

    def _log(self, row: dict[str, float]) -> None:
        self.log_dict(
            {k: float(v) for k, v in row.items()}, on_step=False, on_epoch=True, batch_size=1
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The server's optimizer of the global model."""
        return self.server_optimizer_factory([self.space.vector])

    # ---- evaluation ---------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Begin a pass over all clients."""
        self.evaluation = Evaluation(self._loop.num_clients, self.device)

    def validation_step(self, clients: Clients, batch_idx: int = 0) -> None:
        """Global and personalized scores of a chunk of clients."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            self._attach(clients)
            self.evaluation.update(self, clients)

    def on_validation_epoch_end(self) -> None:
        """Log the scores, once all clients are through."""
        scores = self.evaluation.finish()
        self.row = {**self.row, "round": self.rounds, **scores}
        self._log({"round": self.rounds, **scores})

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, clients: Clients, batch_idx: int = 0) -> dict[str, np.ndarray]:
        """Predictions for each client's test samples by each kind of model that the method has."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            self._attach(clients)
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
        loop.stateful = bool(self._client_states)
        if not loop.val_dataloader():
            trainer.limit_val_batches = 0  # or Lightning warns of an empty loader
        device = trainer.strategy.root_device
        self.space.bind(self.network)
        data = loop.client_data(device)
        owner = int(loop.datamodule.client_sizes.argmax())
        few = Clients(np.array([owner]), 0, data, dtype=self.space.vector.dtype)
        batch = next(few.batches(self._probe_size(loop)))
        self.oracle.inspect(batch.inputs[0], batch.targets[0], loop.datamodule.num_classes)
        if loop.clients_at_once is None:
            loop.clients_at_once = max(1, CHUNK_FLOATS // self.space.size)

    def _probe_size(self, loop: FederatedLoop) -> int:
        """Two samples, or one where some client's last batch is that small (BatchNorm minds)."""
        sizes = loop.datamodule.client_sizes
        left = sizes if self.batch_size is None else sizes % self.batch_size
        return 1 if self.batch_size == 1 or (left[sizes > 0] == 1).any() else 2

    def on_fit_start(self) -> None:
        """Allocate what clients remember, with the final device and dtype, or take it over."""
        self.oracle.to(self.device, self.space.vector.dtype)
        if self.device.type == "cpu" and self.space.size < ONE_THREAD_PARAMETERS:
            torch.set_num_threads(1)
        self.oracle.precision = self.trainer.precision_plugin.forward_context
        total = self._loop.num_clients
        if not hasattr(self, "store") or self.store.num_clients != total:
            self.store, self.ledger = ClientStore(total), Ledger(total)
            self.bytes_down = self.bytes_up = 0
            for name, initial in self._client_states.items():
                self.store.declare(name, initial().cpu())
            if self.oracle.buffers.size and self.buffer_policy == "local":
                buffers = self.oracle.buffers.read(self.network, self.global_model)
                self.store.declare("buffers", buffers.cpu())
        if self._loaded is not None:
            restore(self, self._loaded)
            self._loaded = None

    def teardown(self, stage: str) -> None:
        """Leave the process with as many threads as it had."""
        torch.set_num_threads(self._threads)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def _attach(self, clients: Clients) -> None:
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
        checkpoint["federated"] = save(self, self._loop.datamodule.partition.hash)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another run; the rest waits until the device is known."""
        self._loaded = checkpoint.get("federated")
        if self._trainer is not None:  # else: load_from_checkpoint, which wants the model only
            check(self, self._loaded, self._loop.datamodule.partition.hash)

    def client_bytes(self) -> dict[str, Tensor]:
        """Bytes that every client has sent (`uplink`) and received (`downlink`), int64 [M].

        Every process must call it.
        """
        counts = [ledger.state_dict() for ledger in gather(self.ledger)]
        return {way: torch.stack([c[way] for c in counts]).sum(0) for way in counts[0]}

    @property
    def _loop(self) -> FederatedLoop:
        loop = getattr(self.trainer, "datamodule", None)
        if not isinstance(loop, FederatedLoop):
            raise ConfigError(
                f"datamodule: {type(self).__name__} trains with a FederatedLoop around the data; "
                f"pass datamodule=FederatedLoop(your_datamodule, clients_per_round=...)"
            )
        return loop

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FederatedAlgorithm:
        super()._apply(fn, recurse)
        self.space.bind(self.network)  # moving a module gives its parameters new storage
        return self
