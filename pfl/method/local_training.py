"""Local steps of clients: their arguments, and the loops that take them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self

from pfl._private import MovableModule
from pfl.clients import Clients, LocalSchedule
from pfl.clients.rates import RateSchedule, step_rate
from pfl.datamodules.ranges import Checked, Count, NonNegative, Positive, PositiveShare, Range
from pfl.engines.base import EngineName
from pfl.engines.batch import Batch, StepBlock, default_loss
from pfl.engines.local_step import (
    LocalOptimizer,
    OptimizerFactory,
    Step,
    check_local_step,
    clipped,
    step_of,
)
from pfl.engines.objective import BatchSamples, Objective, ObjectiveLoss
from pfl.engines.oracle import Oracle
from pfl.engines.parts import gradient_in_parts
from pfl.errors import ConfigError
from pfl.method.groups import ClientGroups
from pfl.method.labels import label_counts
from pfl.method.local_terms import LocalTerms
from pfl.method.log import count_gradients, current_log, logging_to
from pfl.method.progress import Progress
from pfl.method.stopping import EarlyStopping
from pfl.method.weights import load_weights
from pfl.models.adapters import Trainable, train_only
from pfl.models.classifier import Classifier
from pfl.models.family import Family
from pfl.parameters import ParameterSpace, checksum, frozen_parameters, refuse_computed
from pfl.stages.factors import trained_factors

Network: TypeAlias = Classifier | Family | nn.Module
"""A network, or several. The command line looks for a short name, as MLP, among our own first."""


def train_part(network: nn.Module, trainable: Trainable | str | None) -> None:
    """Freezes all of a network but a part; None leaves it as it is.

    Raises:
        ConfigError: The network has no such part.
    """
    if trainable is None:
        return
    try:
        train_only(network, trainable)
    except ValueError as error:
        raise ConfigError(f"model.trainable: {error}") from error


OF_THE_NETWORK = {"network", "weights", "trainable", "buffers"}  # a made network has these already


class Remade(Checked):
    """An object that can be made once more, with another network.

    A class of its own, below the methods: the command line asks the `__init__` of a class for its
    options only where `__new__` is that of a base class.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls, *args, **kwargs)
        if args or kwargs:  # a copy has none
            made.__dict__["_made_of"] = (args, kwargs)
        return made

    def made_with(self, network: nn.Module) -> Self:
        """Returns an object of the same class and arguments, with another network."""
        args, kwargs = self.__dict__["_made_of"]
        others = {name: value for name, value in kwargs.items() if name != "network"}
        return type(self)(network, *args[1:], **others)


class LocalTraining(Remade, MovableModule):
    """A network, the engine that runs it with the models of many clients, and their local steps.

    Args:
        network: The architecture with its initial values.
        weights: A file of weights, or the folder of a run, with which the network begins.
        lr: Local learning rate η.
        lr_decay: Factor on `lr` after every round.
        schedule: Schedules of `lr`; their factors are multiplied.
        clip: The largest norm of a client's mini-batch gradient; null: any.
        accumulate: In how many parts the gradient of a step is computed, to take less memory.
        class_weights: "client": the classes of each client count alike in its loss.
        weight_decay: A factor; weight_decay * w is added to local gradients.
        local_epochs: Passes of a client over its own data in a round.
        local_patience: Local epochs without a smaller validation loss until a client stops.
        local_steps: A number of local steps that replaces `local_epochs`; null: none does.
        batch_size: Samples in a local step; null: all that the client has.
        optimizer: An elementwise `torch.optim` optimizer, made anew in every round with the rate
            `lr`. null: plain SGD.
        buffers: What happens to buffers that training changes (BatchNorm's running statistics).
            "average": they follow the parameters of their model, which are sent, averaged or kept.
            "local": they never leave the client, which keeps those of each model it trains.
        loss: loss(output, target), a value per sample; null: cross entropy for integer targets,
            mean squared error for floating ones.
        engine: How the network is run: "auto", the fastest engine that works; "sequential", one
            client after another; "vmap", all at once; "debug", slowly, with client, round, epoch
            and step in every error; or the path of a class that derives from `pfl.engines.Engine`.
        trainable: What of the network is trained: an adapter (a class below, or "lora", "delta",
            "adapter", "prompt"), "head", "bias", "norm" or "all". The rest is frozen: it exists
            once, and is neither sent nor in checkpoints. null: what the network has not frozen.

    Attributes:
        network: The architecture. Its parameters are views of the global model.
        family: The networks of the clients, where they have their own; None: all have `network`.
        space: The `ParameterSpace`, which maps parameters by name to the P floats of a model.
        oracle: Gives losses and gradients of many clients' models.
        factors: The layers with two factors of LoRA that are trained.
        trained_part: Which of the P values the clients train, bool [P], as a method sets it in its
            constructor where these are not all; None: all. It is no part of a checkpoint.
        progress: What the run has done so far.
    """

    argument_group = "model"
    wrapper: ClassVar[type[nn.Module] | None] = None
    """The class of network that the method trains, made of the given one; None: that one itself."""
    trained_part: Tensor | None

    def __init__(
        self,
        network: Network,
        *,
        weights: str | None = None,
        lr: Annotated[float, Range(above=0, below=1e38)] = 0.1,
        lr_decay: PositiveShare = 1.0,
        schedule: RateSchedule | list[RateSchedule] | None = None,
        clip: Positive | None = None,
        accumulate: Count = 1,
        class_weights: Literal["client"] | None = None,
        weight_decay: NonNegative = 0.0,
        local_epochs: Count = 1,
        local_patience: Count | None = None,
        local_steps: Count | None = None,
        batch_size: Count | None = 32,
        optimizer: OptimizerFactory | None = None,
        buffers: Literal["average", "local"] = "average",
        loss: nn.Module | None = None,
        engine: EngineName = "auto",
        trainable: Trainable | str | None = None,
    ) -> None:
        super().__init__()
        self.family: Family | None = None
        if isinstance(network, Family):
            if weights is not None:
                raise ConfigError(
                    f"model.weights: {weights}; the clients have several networks (Family), and "
                    f"one file has the values of one; leave it out"
                )
            self.family = network
            for one in network.networks.values():
                refuse_computed(one)
            network = copy.deepcopy(network.networks[network.names[0]])
        if not isinstance(network, nn.Module):
            raise ConfigError(f"model.network: {network!r}; it must be a module, such as MLP(64)")
        refuse_computed(network)
        self.automatic_optimization = False
        self.initial_weights: dict[str, str] | None = None
        if weights is not None:
            self.initial_weights = load_weights(network, weights)
        train_part(network, trainable)
        if self.wrapper is not None:
            try:
                network = self.wrapper(network)
            except ValueError as error:
                raise ConfigError(f"model.network: {type(self).__name__}: {error}") from error
        self.network = network
        self.space = ParameterSpace(network)
        self.factors = trained_factors(network, self.space)
        self.oracle = Oracle(network, self.space, loss or default_loss, engine, count_gradients)
        self.groups = ClientGroups(self.oracle)
        self.batch_size = batch_size
        self.buffer_policy = buffers
        self.lr = lr
        self.lr_decay = lr_decay
        self.schedules: list[RateSchedule] = []
        if isinstance(schedule, RateSchedule):
            self.schedules = [schedule]
        elif schedule is not None:
            self.schedules = list(schedule)
        self.clip = clip
        self.accumulate = accumulate
        self.class_weights = class_weights
        self.weighted_classes = 0  # their number, once the data are known
        self.weight_decay = weight_decay
        self.local_epochs = local_epochs
        self.local_patience = local_patience
        self.local_steps = local_steps
        self.optimizer_factory = optimizer
        if optimizer is not None:
            check_local_step(optimizer, lr)
        self.register_buffer("trained_part", None, persistent=False)
        self.progress = Progress()

    @contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Turns autograd and autocast off inside, in the thread that enters.

        Only the oracle runs in the Trainer's precision: server algebra in bf16 would be noise.
        """
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            yield

    def after_move(self) -> None:
        """Makes the network's parameters views of one vector again, after they were moved."""
        self.space.bind(self.network)

    @cached_property
    def body_digest(self) -> str | None:
        """The checksum of the network's frozen parameters; None if it has none."""
        frozen = frozen_parameters(self.network)
        return checksum(dict(frozen)) if frozen else None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state without the frozen parameters, of which checkpoints have a checksum."""
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name in frozen_parameters(self.network):
            state.pop(f"{prefix}network.{name}", None)
        return state

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads a state; the network's frozen parameters stay as they are."""
        own = {}
        for place, module in self.named_modules():
            if isinstance(module, LocalTraining):
                prefix = f"{place}.network.".lstrip(".")
                for name, p in frozen_parameters(module.network).items():
                    own[prefix + name] = p.detach()
        return super().load_state_dict({**state_dict, **own}, *args, **kwargs)

    @property
    def local_settings(self) -> dict[str, Any]:
        """What was given of the arguments of this class, by name, without those of the network."""
        known = inspect.signature(LocalTraining.__init__).parameters.keys()
        _, kwargs = self.__dict__["_made_of"]
        return {n: v for n, v in kwargs.items() if n in known - OF_THE_NETWORK}

    @property
    def local_schedule(self) -> LocalSchedule:
        """The local steps that the method's arguments define, for `clients.batches`."""
        return LocalSchedule(self.batch_size, self.local_epochs, self.local_steps)

    def learning_rate(self, round_index: int) -> float:
        """Returns the local learning rate of a round (from 0)."""
        rate = self.lr * self.lr_decay**round_index
        for schedule in self.schedules:
            rate *= schedule.of_round(round_index)
        return rate

    def rate_of(self, clients: Clients) -> float:
        """Returns the local learning rate of clients that train together, in their round."""
        return self.learning_rate(clients.round) * clients.rate

    @property
    def step_aids(self) -> dict[str, Any]:
        """What was given of the arguments that `local_sgd` alone knows, by name.

        `clip` acts on the gradient of the loss alone, without weight decay and a method's own
        terms. `class_weights` are n / (K n_k) for the n_k of a client's n training samples that
        have the class k, of K classes that the client has.
        """
        aids: dict[str, Any] = {}
        if self.clip is not None:
            aids["clip"] = self.clip
        if any(schedule.by_step for schedule in self.schedules):
            aids["schedule"] = "a schedule by local step"
        if self.accumulate > 1:
            aids["accumulate"] = self.accumulate
        if self.local_patience is not None:
            aids["local_patience"] = self.local_patience
        if self.class_weights is not None:
            aids["class_weights"] = self.class_weights
        return aids

    def require_no_aids(self) -> None:
        """Refuses the arguments of `step_aids`, for methods whose local steps are others."""
        for key, value in self.step_aids.items():
            name = type(self).__name__
            raise ConfigError(
                f"model.{key}: {value}; {name} has local steps of its own, which do not know it; "
                f"leave it out"
            )

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        """Returns how many sample gradients a round takes of clients of these sizes, [C]."""
        return sizes * self.epochs_of(sizes)

    def epochs_of(self, sizes: np.ndarray) -> np.ndarray:
        """Returns over how many epochs the method's local steps go, [C]; a part is a fraction."""
        if self.local_steps is None:
            return np.full(len(sizes), float(self.local_epochs))
        return self.local_schedule.samples_of(sizes) / np.maximum(sizes, 1)

    def log_loss(self, name: str, loss: Tensor, counts: list[int]) -> None:
        """Logs the losses of one batch of a training loop.

        The oracle counts the sample gradients, whether their losses are logged or not.

        Args:
            name: The mean of the losses over samples is logged as `<name>/loss`.
            loss: The losses of a batch's rows, [A].
            counts: Number of samples of each row, its weight in the mean.
        """
        log = current_log()
        if log is not None:
            log.losses.setdefault(name, []).append((loss, counts))

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
        steps: int | None = None,
        lr: float | None = None,
        part: Tensor | None = None,
        mask: Tensor | None = None,
        objective: Objective | ObjectiveLoss | None = None,
        name: str = "train",
    ) -> Tensor:
        """Trains on f_i(v + offset) + <linear, v> + prox_weight/2 |v - prox_center|^2 + l1 |v|_1.

        The steps are v <- soft(v - lr (g + linear + prox_weight (v - prox_center)), lr l1), with g
        a mini-batch's gradient at v + offset; or the method's `optimizer` takes that direction.

        Args:
            clients: The C clients that train.
            start: The first v, [P] for all clients or [C, P].
            linear: The vector of the linear term, [P] or [C, P].
            prox_weight: The weight of the quadratic (proximal) term.
            prox_center: The center of the proximal term, [P] or [C, P] or a number.
            l1: The weight of the l1 norm.
            offset: A part of the model that does not move, [P] or [C, P].
            prox: A function of v [A, P] and the learning rate that is applied after each step,
                such as one that lowers ranks.
            epochs: A number of epochs that replaces `local_epochs` and `local_steps`.
            steps: A number of local steps that replaces all three.
            lr: A learning rate that replaces the round's.
            part: The parameters that move, bool [P] (`space.mask`); the others keep their bits.
                None: `trained_part`.
            mask: A factor of 0 or 1 on every value after each step, [C, P].
            objective: A loss that replaces the method's in f_i, and may see features, tensors of
                the clients and older models; see `Objective`.
            name: The key of the order of samples; the loss is logged as `<name>/loss`.

        Returns:
            v after the local steps, [C, P]. Clients without samples keep their start.
        """
        v = start.expand(len(clients), self.space.size).clone()
        if lr is None:
            lr = self.learning_rate(clients.round)
        lr *= clients.rate
        if part is None:
            part = self.trained_part
        if offset is not None:
            offset = offset.expand_as(v)
        if self.class_weights is not None:
            objective = self._with_class_weights(clients, objective)
        schedule = replace(self.local_schedule, purpose=name)
        stopping = None
        if epochs is not None or steps is not None:
            schedule = replace(schedule, epochs=epochs or 1, steps=steps)
        elif self.local_patience is not None:
            stopping = EarlyStopping(self.oracle, clients, schedule, self.local_patience)
        if not isinstance(prox_center, Tensor) and prox_center:
            prox_center = torch.full_like(v, prox_center)
        drift: Tensor | float = 0.0
        if prox_weight:
            drift = prox_weight * prox_center
        if linear is not None:
            drift = drift - linear
        aided = self.clip is not None or self.accumulate > 1 or stopping is not None
        if prox is None and not aided and not any(one.by_step for one in self.schedules):
            optimizer = None
            if self.optimizer_factory is not None:
                optimizer = self.optimizer_factory([nn.Parameter(torch.zeros(1, 1))])
            step = step_of(optimizer, v, lr, self.weight_decay + prox_weight, drift)
            if step is not None:
                step = step._replace(offset=offset, threshold=lr * l1, part=part, mask=mask)
                self.run_local_steps(clients, v, step, schedule, name, objective)
                return v
        terms = LocalTerms(offset, prox_weight, drift, l1, prox, part, mask)
        self._take_aided_steps(clients, v, lr, terms, schedule, name, objective, stopping)
        return v

    def _take_aided_steps(
        self,
        clients: Clients,
        v: Tensor,
        lr: float,
        terms: LocalTerms,
        schedule: LocalSchedule,
        name: str,
        objective: Objective | ObjectiveLoss | None,
        stopping: EarlyStopping | None,
    ) -> None:
        """Takes local steps of v [C, P] in place that no line of `Step` describes.

        Their gradients are clipped or accumulated, their rate differs by step, some clients stop
        early, the optimizer is not one of those that `step_of` knows, or a function follows.
        """
        by_step = [one for one in self.schedules if one.by_step]
        optimizer = self.local_optimizer(v, lr, terms.part)
        rate = lr
        for number, batch in enumerate(clients.batches(schedule)):
            counts = batch.counts
            if stopping is not None:
                counts = (np.array(counts) * stopping.moving[: batch.clients]).tolist()
            at = terms.point(v)
            if self.accumulate > 1:
                loss, g = self._gradient_in_parts(at, batch, clients.buffers, objective, counts)
            else:
                loss, g = self.oracle.gradient(at, batch, clients.buffers, objective, counts)
            if self.clip is not None:
                g = clipped(g, self.clip, terms.part)
            if by_step:
                rate = step_rate(lr, by_step, number)
                optimizer.set_rate(rate)
            optimizer.step(terms.direction(g, v), batch.clients)
            terms.after_step(v[: batch.clients], rate)
            self.log_loss(name, loss, counts)
            if stopping is not None:
                stopping.after_step(number, v, terms.offset)
                if not stopping.moving.any():
                    break
                stopping.hold(v)
        if stopping is not None:
            stopping.finish(v)

    def _gradient_in_parts(
        self,
        v: Tensor,
        batch: Batch,
        buffers: Tensor | None,
        objective: Objective | ObjectiveLoss | None,
        counts: list[int],
    ) -> tuple[Tensor, Tensor]:
        """Returns what `oracle.gradient` does, computed in `accumulate` parts of the batch."""

        def gradient(
            w: Tensor, part: Batch, own: Tensor | None, rows: Tensor
        ) -> tuple[Tensor, Tensor]:
            f = objective
            if isinstance(f, Objective):
                f = f.rows(rows)
            pairs = zip(rows.tolist(), part.counts, strict=True)
            counted = [number if counts[row] else 0 for row, number in pairs]
            return self.oracle.gradient(w, part, own, f, counted)

        runner = self.oracle.runner
        return gradient_in_parts(gradient, runner, v, batch, buffers, self.accumulate)

    def _with_class_weights(
        self, clients: Clients, objective: Objective | ObjectiveLoss | None
    ) -> Objective:
        """Returns the loss in which the classes of each client count alike."""
        if objective is not None:
            raise ConfigError(
                f"model.class_weights: {self.class_weights}; {type(self).__name__} has a loss of "
                f"its own, which does not know them; leave it out"
            )
        return Objective(self._weighted_losses, {"weights": self._class_weights_of(clients)})

    def _class_weights_of(self, clients: Clients) -> Tensor:
        """Returns n / (K n_k) for each client and class k, [C, classes]; 0 where n_k is 0."""
        counts = label_counts(clients, self.weighted_classes, self.space.vector.detach())
        total = counts.sum(1, keepdim=True)
        present = (counts > 0).sum(1, keepdim=True)
        return torch.where(counts > 0, total / (present * counts), 0.0)

    def _weighted_losses(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns the loss of each of a client's samples times the weight of its class, [n]."""
        return own["weights"][samples.targets] * self.oracle.losses(outputs, samples.targets)

    def local_optimizer(self, v: Tensor, lr: float, part: Tensor | None = None) -> LocalOptimizer:
        """Returns the user's `optimizer`, or plain SGD, of C clients' values v, [C, K].

        Args:
            v: What the optimizer changes in place.
            lr: The learning rate.
            part: Which of the K values move, bool [K]; None: all.
        """
        return LocalOptimizer(v, lr, self.weight_decay, self.optimizer_factory, part)

    def run_local_steps(
        self,
        clients: Clients,
        v: Tensor,
        step: Step,
        schedule: LocalSchedule,
        name: str,
        objective: Objective | ObjectiveLoss | None = None,
    ) -> None:
        """Takes plain local steps of v [C, P] in place, in several threads if that is faster.

        Args:
            clients: The C clients that train.
            v: What the steps change.
            step: The line of one step.
            schedule: How many steps each client takes.
            name: The losses are logged as `<name>/loss`.
            objective: A loss that replaces the method's; see `local_sgd`.
        """
        oracle = self.oracle
        threads = self.groups.threads
        parts = 1
        several = threads.count > 1 and objective is None and clients.data.in_memory
        if several and oracle.engine.releases_gil():
            parts = threads.workers(len(clients))
        if parts == 1:
            blocks = clients.step_blocks(schedule)
            losses, counts = oracle.descend(v, blocks, step, clients.buffers, objective)
            self.log_loss(name, losses, counts)
            return
        log = current_log()

        def train_part(part: int) -> tuple[Tensor, list[int]]:
            # Every second client and so on, since the first ones have more samples.
            rows = slice(part, None, parts)
            own = clients.rows(rows)
            with torch.no_grad(), logging_to(log):
                return oracle.descend(
                    v[rows], own.step_blocks(schedule), step.rows(rows), own.buffers
                )

        for losses, counts in threads.map(train_part, range(parts)):
            self.log_loss(name, losses, counts)

    def take_steps(
        self, v: Tensor, batch: Batch, step: Step, buffers: Tensor | None, name: str, count: int = 1
    ) -> None:
        """Takes plain steps of v [C, P] in place, all with one mini-batch.

        The result is that of `oracle.gradient` followed by the line of `Step`, but faster.

        Args:
            v: What the steps change; the batch's row c belongs to the row c of v.
            batch: A mini-batch of each of A clients; rows of v from A on keep their values.
            step: The line of one step, for the C rows.
            buffers: [C, number of changing buffer values]; changed in place.
            name: The losses are logged as `<name>/loss`.
            count: The number of steps.
        """
        blocks = [StepBlock.of(batch, v.dtype)] * count
        self.log_loss(name, *self.oracle.descend(v, blocks, step, buffers))

    def adapt(
        self,
        clients: Clients,
        start: Tensor,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        lr: float | None = None,
        part: Tensor | None = None,
    ) -> Tensor:
        """Returns models that were trained on the clients' own training samples for an evaluation.

        For `personalized`, of clients in any split. Nothing is logged, counted or kept: the client
        states, the global model and the training that follows are as if the steps had not been
        taken. The order of samples depends on the seed and the client, and on no round. The
        running statistics of the adapted models replace `clients.buffers`.

        Args:
            clients: C clients.
            start: The models before the steps, [P] or [C, P].
            steps: A number of local steps; 0 returns the start.
            epochs: A number of epochs, where `steps` is not given.
            lr: The learning rate; None: that of the coming round.
            part: The parameters that move, bool [P].

        Returns:
            The adapted models, [C, P]. Clients without training samples keep their start.
        """
        start = start.expand(len(clients), self.space.size)
        if steps == 0:
            return start
        if clients.data.poisson is not None:
            raise ConfigError(
                "loop.sample_privacy: the method trains for its evaluation, and these gradients "
                "are not counted; take another method"
            )
        learners, rows = replace(clients, round=0).training()
        if lr is None:
            # Past the checks of what a client's hook reads: the hook itself reads no round.
            lr = self.learning_rate(self.__dict__["progress"].rounds)
        amount: Any = {"epochs": epochs, "steps": steps}
        with logging_to(None):
            v = self.local_sgd(learners, start[rows], **amount, lr=lr, part=part, name="adapt")
        back = rows.argsort()
        if learners.buffers is not None:
            clients.buffers = learners.buffers[back]
        return v[back]
