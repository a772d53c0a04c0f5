"""What a network does, found out by running a few samples; and whether data and loss fit it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from pfl._private import version_of
from pfl.engines.batch import Batch, default_loss
from pfl.engines.common_layers import layers_in_turn
from pfl.engines.dropout import has_dropout, key_dropout
from pfl.engines.runner import ModelRunner, Transform, name_of
from pfl.engines.sequential import SequentialEngine
from pfl.errors import ConfigError
from pfl.parameters import BufferSpace, never_trained, private_copy, unregistered_parameters
from pfl.randomness import isolated, seed_generators

MISFITS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""Errors of a network or a loss that does not fit the data; timm asserts the sizes of images."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Layers that use the mean of the batch in training, and without statistics in evaluation, too."""


def probe(
    runner: ModelRunner, transform: Transform, batch: Batch, classes: int | None, names_layers: bool
) -> ModelRunner:
    """Returns a runner that has a new copy of the network, and the facts about how it behaves.

    The facts are the buffers that training changes, whether random numbers are drawn, and the
    faster memory layout. Buffers and random generators are as before afterwards. `Oracle.inspect`
    explains the errors. Outputs that are not finite are refused here unless the engine names the
    layer that they come from.
    """
    device = batch.inputs.device
    network = private_copy(runner.original)  # never run, so it keeps nothing of an earlier run
    _refuse_max_norm(network)
    network.train()  # a network's own `train` may keep some layers in evaluation mode
    norms = [m for m in network.modules() if isinstance(m, BATCH_NORMS)]
    without_statistics = any(norm.running_mean is None for norm in norms)
    has_batch_norm = without_statistics or any(norm.training for norm in norms)
    has_keys = has_dropout(network) and (
        layers_in_turn(network, runner.space, batch.inputs[0]) is not None
    )
    if has_keys:
        transform = partial(_transform_and_key, transform)
    is_transformed = transform(network)
    plain = replace(runner, network=network, transform=transform)
    plain.to(device, runner.space.vector.dtype)
    before = {n: (b, version_of(b), b.clone()) for n, b in network.named_buffers()}
    with isolated(device):
        state = _random_state(device)
        _check_fit(plain, batch, classes, names_layers)
        is_stochastic = not all(map(torch.equal, state, _random_state(device)))
        channels_last = _channels_last_pays(plain, batch, is_transformed)
    # All buffers of a module in which one changed: another may have kept its value by chance.
    now = dict(network.named_buffers())
    moved = set()
    for name, buffer in now.items():
        old, version, value = before[name]  # C++ code does not count versions
        if buffer is not old or version_of(buffer) != version or not torch.equal(buffer, value):
            moved.add(name.rpartition(".")[0])
    changed = [n for n in now if n.rpartition(".")[0] in moved]
    with isolated(device):
        if not without_statistics:
            _check_batch_is_not_mixed(plain, batch.inputs[0], training=False)
        if not (norms or changed or is_stochastic):
            _check_batch_is_not_mixed(plain, batch.inputs[0], training=True)
    with torch.no_grad():
        for name, buffer in now.items():
            buffer.copy_(before[name][2])
    buffers = BufferSpace(network, changed)
    return replace(
        plain,
        buffers=buffers,
        is_stochastic=is_stochastic,
        has_keys=has_keys,
        has_batch_norm=has_batch_norm,
        has_batch_norm_in_evaluation=without_statistics,
        channels_last=channels_last,
    )


def _transform_and_key(transform: Transform, network: nn.Module) -> bool:
    """Transforms a copy of a chain with dropout; whether `transform` did anything."""
    key_dropout(network)
    return transform(network)


def _refuse_max_norm(network: nn.Module) -> None:
    """Refuses embeddings that change their own weights in the forward pass.

    The models of clients are rows beside the network, where such a change would be lost.
    """
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise ConfigError(
                f"network: {name or 'the network'} is an {type(layer).__name__} with max_norm="
                f"{layer.max_norm}, which changes its weights in each forward pass; give None"
            )


def _check_fit(runner: ModelRunner, batch: Batch, classes: int | None, names_layers: bool) -> None:
    """Raises a ConfigError unless data, network and loss fit each other."""
    lost = unregistered_parameters(runner.network)
    outputs = _outputs_of(runner, batch.inputs[0], list(lost))
    _check_outputs(runner, outputs, batch.targets[0], classes, names_layers)
    if lost:
        _check_lost_are_unused(runner, batch.inputs[0], lost)
    _check_loss(runner, batch, outputs)


def _outputs_of(runner: ModelRunner, inputs: Tensor, lost: list[str]) -> Tensor:
    """Returns the outputs of the network, or raises a ConfigError if it does not take the inputs.

    `lost` are parameters that PyTorch does not list.
    """
    name = type(runner.network).__name__
    w = runner.space.vector.detach().clone()
    try:
        with torch.no_grad(), runner.precision():
            outputs = runner.load(w, None, training=True)[0](inputs)
    except MISFITS as error:
        if lost:  # they stay on another device, or in another dtype
            raise never_trained(name, lost) from error
        single = ""
        if len(inputs) == 1:
            single = (
                ", in a batch of one sample, as a client's last one is with this model.batch_size, "
                "or a part of one with model.accumulate"
            )
        raise ConfigError(
            f"network: {name} cannot process inputs of shape {list(inputs.shape[1:])}{single}: "
            f"{first_line(error)}{_advice(error, inputs)}"
        ) from error
    if not isinstance(outputs, Tensor):
        raise ConfigError(
            f"network: {name} returns a {type(outputs).__name__}; it must return one tensor, as "
            f"pfl.models.Pretrained does for a transformer of Hugging Face"
        )
    return outputs


def _check_outputs(
    runner: ModelRunner, outputs: Tensor, targets: Tensor, classes: int | None, names_layers: bool
) -> None:
    """Refuses outputs that are not finite, or are fewer than the classes of the data."""
    name = type(runner.network).__name__
    if not (names_layers or outputs.isfinite().all()):
        raise ConfigError(
            f"network: {name} gives NaN or infinite outputs before any training; with engine: "
            f"debug an error names the layer"
        )
    needed = _outputs_needed(runner, targets, classes)
    if needed is not None and (outputs.ndim < 2 or outputs.shape[1] < needed):
        raise TooFewOutputs(
            f"network: {name} gives outputs of shape {list(outputs.shape[1:])} for data "
            f"with {needed} classes; give it num_classes={needed}, or, "
            f"{_instead_of_classes(runner, outputs, targets, needed)}"
        )


def _check_loss(runner: ModelRunner, batch: Batch, outputs: Tensor) -> None:
    """Refuses a loss that does not take these outputs, mixes samples, or has no usable gradient."""
    targets = batch.targets[0]
    w = runner.space.vector.detach().clone()[None]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's, of a broadcast that is refused below
            loss, _ = SequentialEngine(runner).gradient(w, batch)
        _check_samples_are_independent(runner, outputs, targets)
    except ConfigError:
        raise
    except MISFITS as error:
        raise ConfigError(_why_no_loss(runner, outputs, targets, error)) from error
    if loss.isnan().any() and outputs.isfinite().all():
        raise ConfigError(
            f"loss: {name_of(runner.loss)} gives NaN for finite outputs before any training"
        )


def _why_no_loss(runner: ModelRunner, outputs: Tensor, targets: Tensor, error: Exception) -> str:
    """Returns what is wrong where the loss, or its gradient, raises an error."""
    name = type(runner.network).__name__
    if "sparse tensor" in str(error):
        return (
            f"network: {_sparse_layers(runner.network)} of {name} has a sparse gradient; make it "
            f"with sparse=False"
        )
    if runner.loss is default_loss and targets.is_floating_point():
        return (
            f"data: the targets {list(targets.shape)} are {targets.dtype}, so that the loss is the "
            f"squared error, but {name} gives outputs {list(outputs.shape)}; labels of classes "
            f"must be integers, as of targets.long(), or of target_kind: classes in a "
            f"TableDataModule"
        )
    if "does not require grad" in str(error):
        return (
            f"network: the loss of {name} has no gradient; leave out detach() and no_grad() in "
            f"{name} and in {name_of(runner.loss)}"
        )
    return (
        f"loss: {name_of(runner.loss)} cannot compare outputs {list(outputs.shape)} of {name} with "
        f"targets {list(targets.shape)} ({targets.dtype}): {first_line(error)}"
    )


class TooFewOutputs(ConfigError):
    """The network has fewer outputs than the data have classes."""


def _outputs_needed(runner: ModelRunner, targets: Tensor, classes: int | None) -> int | None:
    """Returns the number of classes without one that the loss ignores, as 255 in segmentation."""
    ignored = getattr(runner.loss, "ignore_index", None)
    if classes is None or ignored != classes - 1:
        return classes
    return int(torch.where(targets == ignored, -1, targets).max()) + 1


def _instead_of_classes(runner: ModelRunner, outputs: Tensor, targets: Tensor, classes: int) -> str:
    """Returns what else can be meant where a network has fewer outputs than there are classes."""
    if outputs.numel() == len(outputs):
        meant = "for a regression"
        if runner.label_threshold is not None:
            meant = f"for one output with {name_of(runner.loss)}"
        return (
            f"{meant}, make the targets floating numbers, as of targets.float(), or of "
            f"target_kind: numbers in a TableDataModule"
        )
    if targets.ndim > 1:
        return (
            f"if {classes - 1} means that there is no class, make it -100 in the targets, or set "
            f"model.loss to torch.nn.CrossEntropyLoss with ignore_index: {classes - 1}"
        )
    return "if the labels begin with 1, subtract 1"


def _advice(error: Exception, inputs: Tensor) -> str:
    """Returns what to do where a network cannot process the inputs, as far as that is known."""
    shape = inputs.shape[1:]
    if not inputs.is_floating_point() and "type" in str(error):
        return f'; the inputs are {inputs.dtype}: make them floating, as inputs.astype("float32")'
    if "more than 1 value per channel" in str(error):
        return "; take another batch_size, null for all samples, or pfl.models.replace_batch_norm"
    if len(shape) == 3 and shape[2] in (1, 3) and shape[0] == shape[1] > 3:
        return "; channels come first, as of inputs.transpose(0, 3, 1, 2)"
    if len(shape) == 2 and "channels" in str(error):
        return "; images need an axis of channels, as of inputs[:, None]"
    return ""


def _sparse_layers(network: nn.Module) -> str:
    """Returns the names of the layers that were made with sparse=True, or "a layer"."""
    names = [name for name, layer in network.named_modules() if getattr(layer, "sparse", False)]
    return ", ".join(names) or "a layer"


def _check_lost_are_unused(runner: ModelRunner, inputs: Tensor, lost: dict[str, Tensor]) -> None:
    """Refuses a network whose outputs have gradients for parameters that PyTorch does not list.

    A teacher that runs inside of `torch.no_grad()` has none.
    """
    with torch.enable_grad(), runner.precision():
        network, _ = runner.load(runner.space.vector.detach(), None, training=True)
        outputs = network(inputs.clone())  # a network may change its inputs
    if not outputs.requires_grad:
        return
    slopes = torch.autograd.grad(outputs.sum(), list(lost.values()), allow_unused=True)
    used = [name for name, slope in zip(lost, slopes, strict=True) if slope is not None]
    if used:
        raise never_trained(type(network).__name__, used)


@torch.no_grad()
def _check_batch_is_not_mixed(runner: ModelRunner, inputs: Tensor, *, training: bool) -> None:
    """Refuses a network whose outputs for one sample depend on what is beside it in the batch.

    The sample is run beside itself and beside a changed copy of another one. The model is a little
    off its start, where a last layer may be 0.
    """
    sample = inputs[:1]
    other = inputs[-1:].flip(tuple(range(1, inputs.ndim)))
    if other.is_floating_point():  # tokens stay tokens
        other = 2 * other + 1
    w = runner.space.vector.detach()
    w = w + 0.01 * torch.randn_like(w)
    results = []
    for neighbour in (sample, other):
        seed_generators(runner.device, 0)  # dropout draws the same twice
        network, _ = runner.load(w, None, training=training)
        try:
            with runner.precision():
                outputs = network(torch.cat([sample, neighbour]))
        except MISFITS:  # the network does not take the changed copy
            return
        results.append(outputs[0].double())
    alone, beside = results
    if alone.shape == beside.shape and _differ(runner, alone, beside):
        mode = "evaluation"
        if training:
            mode = "training"
        raise ConfigError(
            f"network: in {mode} mode the outputs of {type(runner.network).__name__} for a sample "
            f"depend on the other samples of the batch; take means, maxima and norms over the "
            f"values of one sample, not over axis 0"
        )


def _check_samples_are_independent(runner: ModelRunner, outputs: Tensor, targets: Tensor) -> None:
    """Refuses a loss in which samples meet.

    Such a loss broadcasts [n, 1] against [n], every sample against every other, or uses a statistic
    of the batch. Where its values still are [n], the loss of the first sample is that beside itself
    and that beside the last one.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of the same
        outputs, targets = (t.repeat_interleave(2, 0) for t in (outputs, targets))
        targets = runner.as_compared(outputs, targets)
        together, single = (runner.loss(outputs[:n], targets[:n]) for n in (len(targets), 1))
    if together.shape[1:] != single.shape[1:]:
        raise ConfigError(
            f"loss: {name_of(runner.loss)} compares outputs {list(outputs.shape)} with targets "
            f"{list(targets.shape)} all against all; give both the same shape, as "
            f"outputs.reshape(targets.shape) has that of the targets"
        )
    beside = []
    for neighbour in (slice(1), slice(-1, None)):
        pair = [torch.cat([x[:1], x[neighbour]]) for x in (outputs, targets)]
        with torch.no_grad(), warnings.catch_warnings(), isolated(runner.device):
            warnings.simplefilter("ignore")
            seed_generators(runner.device, 0)  # a loss that draws draws the same twice
            beside.append(runner.loss(*pair)[0].double())
    if _differ(runner, *beside):
        raise ConfigError(
            f"loss: the loss of {name_of(runner.loss)} for a sample depends on the other samples "
            f"of the batch, for outputs {list(outputs.shape)} and targets {list(targets.shape)}; "
            f"give both the same shape, and use no mean or sum over axis 0"
        )


def _differ(runner: ModelRunner, alone: Tensor, beside: Tensor) -> bool:
    """Whether a sample has other values in another batch, beyond rounding; not if some are NaN."""
    if not (alone.isfinite().all() and beside.isfinite().all()):
        return False
    tolerance = 0.001
    if runner.device.type != "cpu" or runner.is_mixed_precision:
        tolerance = 0.1
    return bool((beside - alone).norm() > tolerance * alone.norm() + 1e-6)


def _channels_last_pays(runner: ModelRunner, batch: Batch, is_transformed: bool) -> bool:
    """Whether images should have their channels last.

    On CPUs max pooling is several times faster with this layout, and transformed layers need it.
    """
    pools = any(isinstance(m, nn.MaxPool2d) for m in runner.network.modules())
    on_cpu = batch.inputs.device.type == "cpu"
    if not on_cpu or not (pools or is_transformed) or batch.inputs[0].ndim != 4:
        return False
    w = runner.space.vector.detach().clone()[None]
    # Two samples of each, since a single image may look as if it had either layout.
    inputs, targets = (x.repeat_interleave(2, 1) for x in (batch.inputs, batch.targets))
    doubled = Batch(inputs, targets, [2 * n for n in batch.counts])
    try:
        SequentialEngine(replace(runner, channels_last=True)).gradient(w, doubled)
    except RuntimeError:  # a network that takes views of its feature maps
        return False
    return True


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
