"""The oracle: the only place where a network runs.

Everything else in a method is algebra on [C, P] matrices whose rows are the clients' models.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from pfl.datamodules.transforms.target_scale import TargetScale
from pfl.engines.base import Engine, EngineName
from pfl.engines.batch import Batch, StepBlock, cast
from pfl.engines.graph import GraphEngine, records
from pfl.engines.local_step import Step
from pfl.engines.objective import Objective, ObjectiveLoss
from pfl.engines.private import PrivateEngine
from pfl.engines.probe import probe
from pfl.engines.registry import engines_for
from pfl.engines.runner import Loss, ModelRunner, Precision
from pfl.engines.select import select_engine, select_objective_engine, select_transform
from pfl.engines.sequential import SequentialEngine
from pfl.engines.timing import Timing, engine_named, fastest_engine
from pfl.errors import ConfigError
from pfl.parameters import BufferSpace, ParameterSpace, private_copy
from pfl.randomness import DrawKey

_choosing = threading.Lock()  # one thread chooses the engine of objectives


class Oracle:
    """Losses, gradients and local steps of many clients' models.

    `inspect` must be called once with a few samples before anything else: it chooses the engine.

    Args:
        network: The architecture. A private copy is run; the original is never run or changed.
        space: Maps the network's parameters to vectors.
        loss: Of outputs and targets: a module such as `torch.nn.CrossEntropyLoss`, or a function.
            It must return one value (or one tensor) per sample; an attribute `reduction` is set to
            "none" in a private copy.
        engine: "auto" takes the fastest engine that works for the network (`select_engine`);
            "sequential", "vmap", "debug" and the paths of classes are taken as they are.
        count: Is told how many sample gradients each call of `gradient` or `descend` takes, in the
            thread of the call; None: nobody counts.

    Attributes:
        engine: The engine in use.
        requested: The engine that was asked for.
        chosen: The name of the engine that was chosen by its speed on a GPU; None: none was.
        timing: What the comparison has found; None where there was none.

    Raises:
        ConfigError: There is no engine of this name.

    Example:
        >>> from pfl.engines import Batch, Oracle, default_loss
        >>> network = nn.Linear(2, 3)
        >>> space = ParameterSpace(network)
        >>> oracle = Oracle(network, space, default_loss)
        >>> oracle.inspect(torch.zeros(4, 2), torch.tensor([0, 1, 2, 0]), num_classes=3)
        >>> w = space.vector.detach().repeat(5, 1)  # five clients, P = 9
        >>> batch = Batch(torch.zeros(5, 4, 2), torch.zeros(5, 4, dtype=torch.int64), [4] * 5)
        >>> loss, g = oracle.gradient(w, batch)
        >>> loss.shape, g.shape
        (torch.Size([5]), torch.Size([5, 9]))
    """

    engine: Engine

    def __init__(
        self,
        network: nn.Module,
        space: ParameterSpace,
        loss: Loss,
        engine: EngineName = "auto",
        count: Callable[[int], None] | None = None,
    ) -> None:
        engines_for(engine)  # refuses what is unknown
        self.requested = engine
        self._count = count
        loss = copy.deepcopy(loss)
        if hasattr(loss, "reduction"):
            loss.reduction = "none"
        self._network = network
        self._use(SequentialEngine(ModelRunner(network, private_copy(network), space, loss)))

    def _use(self, engine: Engine) -> None:
        self.engine = engine
        self.runner = engine.runner
        self._objective_engine: Engine | None = None
        self.chosen: str | None = None
        self.timing: Timing | None = None

    @property
    def space(self) -> ParameterSpace:
        """The map between the network's parameters and vectors."""
        return self.runner.space

    @property
    def buffers(self) -> BufferSpace:
        """The buffers that training changes (running statistics); known after `inspect`."""
        return self.runner.buffers

    def inspect(
        self,
        inputs: Tensor,
        targets: Tensor,
        num_classes: int | None = None,
        precision: Precision = nullcontext,
        network: nn.Module | None = None,
        target_scale: TargetScale | None = None,
    ) -> None:
        """Runs a few samples [n, ...], finds out what the network does, and chooses the engine.

        Args:
            inputs, targets: Samples of one client.
            num_classes: Number of classes; None for regression.
            precision: Opens the precision context in which the network runs (autocast).
            network: What runs in the place of the network, with parameters of the same names.
            target_scale: The unit in which losses compare values; None: that of the targets.

        Raises:
            ConfigError: The network cannot take these inputs, its output does not fit the targets,
                the loss is not per sample, or the requested engine cannot run this network.
        """
        old = self.runner
        self._few = inputs, targets
        batch = Batch(inputs[None], targets[None], [len(inputs)])
        transform = select_transform(self.requested, inputs.device)
        runner = ModelRunner(network or self._network, old.network, old.space, old.loss, precision)
        runner.target_scale = copy.deepcopy(target_scale)  # the data module's stays where it is
        if runner.target_scale is not None:
            runner.target_scale.to(inputs.device, old.space.vector.dtype)
        runner = probe(runner, transform, batch, num_classes, self.requested == "debug")
        with torch.no_grad():
            self._selected = select_engine(self.requested, runner, batch)
            self._use(self._selected)

    @torch.no_grad()
    def choose_fastest(self, block: StepBlock, name: str | None = None) -> None:
        """Takes the engine that is fastest on a GPU, measured on a few local steps.

        Nothing happens where an engine was asked for by name, where only one can run the network,
        and on CPUs, where `pfl.engines.select` knows the order.

        Args:
            block: Local steps of as many clients, and on as many samples, as the run's.
            name: The engine that an interrupted run had; it is taken without a measurement.
        """
        if self.requested != "auto" or isinstance(self.engine, PrivateEngine):
            return
        if not records(self.runner.device) or self.runner.is_stochastic:
            return
        if name is not None:
            known = engine_named(name, self._selected, block.clients)
            if known is not None:
                self._use(known)
                self.chosen = name
                return
        timing = fastest_engine(self._selected, block)
        self._use(timing.engine)
        self.chosen = timing.engine.name
        self.timing = timing
        rank_zero_info(timing.describe())

    def stop_recording(self) -> bool:
        """Goes on without recorded steps, which take memory; returns whether there were any."""
        if not isinstance(self.engine, GraphEngine):
            return False
        self.engine.release()
        self._use(self.engine.evaluator)
        self.chosen = self.engine.name
        return True

    def make_private(
        self, clip: float, noise_multiplier: float, batch_size: int | None, draws: DrawKey
    ) -> PrivateEngine:
        """Gives all gradients sample-level privacy; see `PrivateEngine`, which is returned."""
        inner = self.engine
        if isinstance(inner, PrivateEngine):
            inner = inner.inner
        engine = PrivateEngine(inner, clip, noise_multiplier, batch_size, draws)
        self.engine = engine
        return engine

    # ---- training -----------------------------------------------------------------------------

    @torch.no_grad()
    def gradient(
        self,
        w: Tensor,
        batch: Batch,
        buffers: Tensor | None = None,
        objective: Objective | ObjectiveLoss | None = None,
        counted: list[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the mean loss [A] of each row of a batch, and its gradient [C, P].

        Args:
            w: [C, P] with C >= A: row c is the model of the batch's row c. From A on, rows of the
                gradient are zero.
            batch: A mini-batch of each of A clients.
            buffers: [C, number of changing buffer values]; changed in place by running the network.
            objective: A loss that replaces the method's; see `pfl.engines.objective.Objective`. A
                function alone needs no tensors of the clients.
            counted: How many sample gradients of each row are counted; None: one for each sample.
                It is 0 for a client that has stopped, and whose row is not used.
        """
        A = batch.clients
        engine, f = self._engine_of(objective)
        loss, g = engine.gradient(w[:A], batch, buffers, f)
        if counted is None:
            counted = batch.counts
        if self._count is not None:
            self._count(sum(counted))
        if len(w) > A:
            g = torch.cat([g, g.new_zeros(len(w) - A, w.shape[1])])
        return loss, g

    def _engine_of(self, loss: Objective | ObjectiveLoss | None) -> tuple[Engine, Objective | None]:
        """Returns the engine that takes the gradients of an objective, and the objective."""
        if loss is None:
            return self.engine, None
        if isinstance(self.engine, PrivateEngine):
            raise ConfigError(
                "loop.sample_privacy: the method has a loss of its own, whose gradients of "
                "single samples are not known; take another method"
            )
        with _choosing:
            if self._objective_engine is None:
                at = self.space.vector
                few = self._few
                inputs, targets = (cast(x.to(at.device), at.dtype) for x in few)
                batch = Batch(inputs[None], targets[None], [len(inputs)])
                self._objective_engine = select_objective_engine(self.engine, batch)
        if not isinstance(loss, Objective):
            loss = Objective(loss)
        return self._objective_engine, loss

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the method's loss of each of n samples, [n], for use in an objective."""
        return self.runner.per_sample(outputs, targets)

    @torch.no_grad()
    def descend(
        self,
        v: Tensor,
        blocks: Iterable[StepBlock],
        step: Step,
        buffers: Tensor | None = None,
        objective: Objective | ObjectiveLoss | None = None,
    ) -> tuple[Tensor, list[int]]:
        """Takes plain steps of v [C, P] in place, batch after batch; see `Engine.descend`.

        The result is that of `gradient` followed by the line of `Step`, but faster: an engine may
        move the models without writing a gradient down, and computes it for the step's `part` only.
        """
        if step.part is not None:
            step = step._replace(moving=self.space.moving(step.part))
        if objective is None:
            losses, counts = self.engine.descend(v, blocks, step, buffers)
        else:
            engine, f = self._engine_of(objective)
            losses, counts = engine.descend(v, blocks, step, buffers, f)
        if self._count is not None:
            self._count(sum(counts))
        return losses, counts

    # ---- evaluation ---------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(
        self, w: Tensor, batch: Batch, buffers: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns loss and correctness of each sample, both [A, B] and zero for padding.

        Args:
            w: [A, P]; row c is evaluated with its own model w[c].
            batch: Samples of A clients.
            buffers: [A, number of changing buffer values].

        Returns:
            The losses; the share of right predictions (0 or 1 for one label a sample; NaN for
            regression); and the outputs [A, B, ...], whose values for padding have no meaning. For
            sequences of classes, losses and shares are means over the sample's real targets.
        """
        with self.runner.precision():
            outputs = self.engine.outputs(w, batch, buffers)
            scores = self.engine.scores(outputs.flatten(0, 1), batch.targets.flatten(0, 1))
        real = batch.sample_weights(scores[0].dtype) > 0
        losses, correct = (torch.where(real, x.view(real.shape), x.new_zeros(())) for x in scores)
        return losses, correct, outputs

    @torch.no_grad()
    def evaluate_one(
        self, w: Tensor, inputs: Tensor, targets: Tensor, buffers: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the same for one model w [P] and samples [n, ...]: [n], [n] and [n, ...]."""
        outputs = self.predict(w, inputs, buffers)
        return *self.engine.scores(outputs, targets), outputs

    @torch.no_grad()
    def predict(self, w: Tensor, inputs: Tensor, buffers: Tensor | None = None) -> Tensor:
        """Returns the outputs [n, ...] of one model w [P] for inputs [n, ...]."""
        return self.engine.predict(w, inputs, buffers)

    # ---- threads and devices ------------------------------------------------------------------

    def allocate_replicas(self, threads: int) -> int:
        """Makes replicas of the network for threads; returns how many threads may run at once.

        Networks that draw random numbers share one generator, and take one thread. 0 frees the
        replicas.
        """
        limit = self.engine.max_threads
        if self.runner.is_stochastic:
            limit = 1
        if limit is not None:
            threads = min(threads, limit)
        self.runner.allocate_replicas(threads)
        return threads
