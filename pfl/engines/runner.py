"""A private copy of a network that is run with one model at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pfl.datamodules.samples.samples import IGNORED
from pfl.datamodules.transforms.target_scale import TargetScale
from pfl.engines.batch import Batch
from pfl.errors import ConfigError
from pfl.models.classifier import head_name
from pfl.parameters import BufferSpace, ParameterSpace, move, private_copy

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Precision: TypeAlias = Callable[[], AbstractContextManager[None]]
Transform: TypeAlias = Callable[[nn.Module], bool]
Replica: TypeAlias = tuple[nn.Module, list[nn.Parameter]]

# PyTorch's losses of values, which compare outputs and targets place by place. A class below one of
# them may do something else.
OF_VALUES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss)


def keep_layers(network: nn.Module) -> bool:
    """Changes nothing: the transform of networks that run as they are."""
    return False


@dataclass
class ModelRunner:
    """What all engines share: network, loss, and what was found out by running both once.

    Running a model points the parameters of the network at the model's values. Each thread
    therefore has a replica of the network, after `allocate_replicas`.

    Attributes:
        original: The user's network; copied, never run or changed. The copies share its frozen
            parameters, which exist once.
        network: The private copy that the main thread runs.
        space: Maps the network's parameters to vectors of P values.
        loss: loss(outputs, targets), one value per sample.
        precision: Opens the Trainer's precision context (autocast).
        transform: Replaces layers of a copy by faster ones of equal value; True if there were any.
        buffers: The buffers that training changes (running statistics).
        is_stochastic: Whether the network draws random numbers from PyTorch's generators.
        has_keys: Whether it draws from the rows' seeds (`pfl.engines.dropout`).
        has_batch_norm: Whether a layer takes means over the batch in training.
        has_batch_norm_in_evaluation: Whether one does in evaluation, as it keeps no statistics.
        channels_last: Whether images are stored with their channels last.
        target_scale: The unit in which losses compare values; None: that of the targets.
    """

    original: nn.Module
    network: nn.Module
    space: ParameterSpace
    loss: Loss
    precision: Precision = nullcontext
    transform: Transform = keep_layers
    buffers: BufferSpace = field(default_factory=lambda: BufferSpace(nn.Identity()))
    is_stochastic: bool = False
    has_keys: bool = False
    has_batch_norm: bool = False
    has_batch_norm_in_evaluation: bool = False
    channels_last: bool = False
    target_scale: TargetScale | None = None

    def __post_init__(self) -> None:
        self._main: Replica = (self.network, self.space.parameters_of(self.network))
        self._unused: list[Replica] = []
        self._of_thread: dict[int, Replica] = {}

    @property
    def device(self) -> torch.device:
        """The device of the models."""
        return self.space.vector.device

    @cached_property
    def head(self) -> str:
        """The name of the network's head."""
        return head_name(self.original)

    @property
    def is_mixed_precision(self) -> bool:
        """Whether the network runs under autocast."""
        with self.precision():
            return torch.is_autocast_enabled(self.device.type)

    @property
    def has_frozen_part(self) -> bool:
        """Whether some of the network's parameters are not trained."""
        return any(not p.requires_grad for p in self.original.parameters())

    @property
    def mixes_samples(self) -> bool:
        """Whether samples of a batch change each other, or running statistics."""
        return self.has_batch_norm or self.buffers.size > 0

    def obstacle_to_batches(self) -> str | None:
        """Returns why clients cannot run in one call; None if nothing is known.

        It is known of `torch.func`; chains of layers may have running statistics.
        """
        if self.buffers.size:
            return f"it keeps running statistics ({self.buffers.names[0]})"
        if self.has_batch_norm:
            return "its samples of a batch change each other (BatchNorm)"
        if self.is_stochastic:
            return "it draws random numbers (dropout elsewhere than in a chain of layers)"
        modules = self.network.named_modules(remove_duplicate=False)
        having = [module for _, module in modules if any(True for _ in module.parameters())]
        if len(having) > len(set(having)):  # `functional_call` gives it other parameters
            return "it uses a module with parameters twice"
        return None

    # ---- running ------------------------------------------------------------------------------

    def load(self, w: Tensor, buffers: Tensor | None, *, training: bool) -> Replica:
        """Returns this thread's network with the model w [P], and its parameters: views of w."""
        network, parameters = self.replica(training=training)
        self.space.point(parameters, w)
        if buffers is not None and self.buffers.size:
            with torch.no_grad():
                self.buffers.write(network, buffers)
        return network, parameters

    def replica(self, *, training: bool) -> Replica:
        """Returns this thread's network, in training or evaluation mode, and its parameters."""
        thread = threading.get_ident()
        if thread not in self._of_thread:
            own = self._main
            if self._unused:
                own = self._unused.pop()
            self._of_thread[thread] = own
        network, parameters = self._of_thread[thread]
        if network.training != training:
            network.train(training)
        return network, parameters

    def predict(self, w: Tensor, inputs: Tensor, buffers: Tensor | None = None) -> Tensor:
        """Returns the outputs [n, ...] of one model w [P] for inputs [n, ...], in evaluation."""
        with self.precision():
            return self.load(w, buffers, training=False)[0](self.laid_out(inputs))

    def laid_out(self, inputs: Tensor) -> Tensor:
        """Returns the inputs in the memory layout that the network runs fastest with."""
        if self.channels_last:
            return inputs.to(memory_format=torch.channels_last)
        return inputs

    # ---- losses and scores --------------------------------------------------------------------

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of each of n samples, [n].

        Raises:
            ConfigError: The loss does not return one value (or one tensor) per sample.
        """
        losses = self.loss(outputs, self.as_compared(outputs, targets))
        if not isinstance(losses, Tensor) or losses.ndim == 0 or len(losses) != len(targets):
            returned = f"a {type(losses).__name__}"
            if isinstance(losses, Tensor):
                returned = f"shape {list(losses.shape)}"
            raise ConfigError(
                f"loss: {name_of(self.loss)} returns {returned} for a batch of "
                f"{len(targets)}; it must return one value per sample (reduction='none')"
            )
        return self._mean_over_targets(losses, targets)

    def as_compared(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the targets as the loss takes them.

        These are labels or values [n] of one output [n, 1] as [n, 1], for PyTorch's own losses, and
        values in the unit of the training.
        """
        if self.target_scale is not None:
            targets = self.target_scale(targets)
        has_one_value = targets.is_floating_point() and targets.ndim == 1
        by_place = self.label_threshold is not None or type(self.loss) in OF_VALUES
        if has_one_value and by_place and outputs.shape[1:] == (1,):
            return targets.unsqueeze(1)
        return targets

    def mean_of(self, losses: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean of the losses [n] of n samples, weighted by their real targets."""
        counts = self.target_counts(targets)
        if counts is None:
            return losses.mean()
        return (losses * counts).sum() / counts.sum().clamp_min(1)

    def weights(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """Returns the samples' weights in the mean losses of their clients, [A, B].

        Each row sums to 1, unless none of its targets is real; padding has weight 0.
        """
        weights = batch.sample_weights(dtype)
        counts = self.target_counts(batch.targets, 2)
        if counts is None:
            return weights
        counts = (counts * (weights > 0)).to(dtype)
        return counts / counts.sum(1, keepdim=True).clamp_min(1)

    def target_counts(self, targets: Tensor, axes: int = 1) -> Tensor | None:
        """Returns how many real targets each sample has, int64, for sequences of classes.

        A target that equals the loss's `ignore_index`, by default -100 as in PyTorch, is the
        padding of a sequence, and counts neither in losses nor in accuracies. Means go over real
        targets, so that a longer sequence counts for more. The first `axes` axes of the targets are
        samples. None where every sample has one target, or floating ones, and counts once.
        """
        if targets.ndim == axes or targets.is_floating_point():
            return None
        return self._real(targets).flatten(axes).sum(axes)

    @property
    def ignored(self) -> int:
        """The class that the loss ignores: the padding of sequences."""
        return getattr(self.loss, "ignore_index", IGNORED)

    def _real(self, targets: Tensor) -> Tensor:
        return targets != self.ignored

    def _mean_over_targets(self, values: Tensor, targets: Tensor) -> Tensor:
        """Returns values [n, ...] as means over the real targets of each sample, [n]."""
        if values.ndim == 1:
            return values
        if targets.is_floating_point() or values.shape != targets.shape:
            return values.flatten(1).mean(1)
        real = self._real(targets)
        total = torch.where(real, values, 0.0).flatten(1).sum(1)
        return total / real.flatten(1).sum(1).clamp_min(1)

    def scores(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each sample's loss and share of right predictions (NaN for regression), [n]."""
        losses = self.per_sample(outputs, targets)
        if targets.is_floating_point():
            if self.label_threshold is None:
                return losses, torch.full_like(losses, torch.nan)
            hits = self.decisions(outputs, targets) == (targets > 0.5)
        else:
            hits = self.decisions(outputs, targets) == targets
        return losses, self._mean_over_targets(hits.to(losses.dtype), targets)

    @property
    def label_threshold(self) -> float | None:
        """The output above which a label is predicted, for losses of labels that are 0 or 1.

        None: the targets are values, or classes.
        """
        if isinstance(self.loss, nn.BCEWithLogitsLoss | nn.MultiLabelSoftMarginLoss):
            return 0.0
        if isinstance(self.loss, nn.BCELoss):
            return 0.5
        return None

    def decisions(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the predicted classes, labels of 0 and 1, or values, of the targets' shape.

        Values are in the targets' own unit.
        """
        if not targets.is_floating_point():
            return outputs.argmax(1)
        outputs = outputs.reshape(targets.shape)
        threshold = self.label_threshold
        if threshold is None:
            return self._own_unit(outputs)
        return (outputs > threshold).to(targets.dtype)

    def predicted(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the network's outputs and the targets in the form that metrics expect.

        Returns:
            The probabilities of classes [n, K, ...] and the classes [n, ...], `IGNORED` for the
            padding of sequences; the probabilities of labels [n, L] and the labels [n, L] as
            integers; or values and values, [n] or [n, L], in the targets' own unit.
        """
        if outputs.dtype.itemsize < 4:
            outputs = outputs.float()
        if not targets.is_floating_point():
            return outputs.softmax(1), torch.where(self._real(targets), targets, IGNORED)
        outputs = self._own_unit(outputs.reshape(targets.shape))
        if targets.shape[1:] == (1,):
            outputs = outputs.flatten()
            targets = targets.flatten()
        threshold = self.label_threshold
        if threshold is None:
            return outputs, targets
        if threshold == 0:  # else the outputs are probabilities
            outputs = outputs.sigmoid()
        return outputs, (targets > 0.5).long()

    def _own_unit(self, outputs: Tensor) -> Tensor:
        """Returns the values of a network in the unit of the targets."""
        if self.target_scale is None:
            return outputs
        return self.target_scale.own_unit(outputs)

    # ---- replicas -----------------------------------------------------------------------------

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Moves the network, and a loss that has tensors of its own (class weights)."""
        move(self.network, device, dtype)
        if self.target_scale is not None:
            self.target_scale.to(device, dtype)
        if isinstance(self.loss, nn.Module):
            self.loss.to(device, dtype)

    def allocate_replicas(self, threads: int) -> None:
        """Makes a replica of the network for each of several threads; 0 frees them."""
        self._of_thread = {threading.get_ident(): self._main}
        self._unused = []
        if threads < 2:
            return
        for _ in range(threads):
            network = private_copy(self.original)
            move(network, self.device, self.space.vector.dtype)
            self.transform(network)
            self._unused.append((network, self.space.parameters_of(network)))

    def release(self) -> None:
        """Drops the references to the last model, so that its memory can be freed."""
        self.space.point(self._main[1], self.space.vector.data)


def name_of(thing: object) -> str:
    """Returns the name of a function, or of an object's class."""
    return getattr(thing, "__name__", type(thing).__name__)
