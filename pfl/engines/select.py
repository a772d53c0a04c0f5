"""What an oracle must know of its network and loss, found out by running a few samples."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from pfl.engines.batch import Batch
from pfl.engines.chain import Chain
from pfl.engines.winograd import WinogradConv2d, install
from pfl.errors import ConfigError
from pfl.parameters import BufferSpace
from pfl.randomness import isolated

if TYPE_CHECKING:
    from pfl.engines.oracle import Oracle

Engine = Literal["auto", "sequential", "vmap"]
MISFITS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)


def inspect(oracle: Oracle, inputs: Tensor, targets: Tensor, num_classes: int | None) -> None:
    """Settle engine, layout, changing buffers and randomness; see `Oracle.inspect`."""
    oracle.to(inputs.device, oracle.space.vector.dtype)
    w = oracle.space.vector.detach().clone()[None]
    batch = Batch(inputs[None], targets[None], [len(inputs)])
    before = {n: (b, b._version, b.clone()) for n, b in oracle.network.named_buffers()}
    oracle.engine, oracle.channels_last, oracle.chain = "sequential", False, None
    oracle.tiles = inputs.device.type == "cpu" and oracle.wanted != "vmap"
    if oracle.tiles:
        install(oracle.network)
    with isolated(inputs.device):
        state = _random_state(inputs.device)
        _try(oracle, w, batch, num_classes)
        oracle.random = not all(
            torch.equal(a, b) for a, b in zip(state, _random_state(inputs.device), strict=True)
        )
        oracle.channels_last = _channels_last(oracle, w, batch)
    # All buffers of a module of which one changed: another may have kept its value by chance.
    now = dict(oracle.network.named_buffers())
    moved = {n.rpartition(".")[0] for n, b in now.items() if _changed(b, *before[n])}
    changed = [n for n in now if n.rpartition(".")[0] in moved]
    with torch.no_grad():
        for name, buffer in oracle.network.named_buffers():
            buffer.copy_(before[name][2])
    oracle.buffers = BufferSpace(oracle.network, changed)
    _settle(oracle, w, batch)


def _changed(now: Tensor, before: Tensor, version: int, value: Tensor) -> bool:
    """Whether a buffer was written, be it with its value; what C++ writes counts no version."""
    return now is not before or now._version != version or not torch.equal(now, value)


def _try(oracle: Oracle, w: Tensor, batch: Batch, num_classes: int | None) -> None:
    """Check that data, network and loss fit each other."""
    name, shape = type(oracle.network).__name__, list(batch.inputs.shape[2:])
    inputs, targets = batch.inputs[0], batch.targets[0]
    try:
        oracle.network.train()
        with torch.no_grad(), oracle.precision():
            oracle.space.point(oracle.space.parameters_of(oracle.network), w[0])
            outputs = oracle.network(inputs)
    except MISFITS as error:
        alone = (
            ""
            if len(inputs) > 1
            else (
                ", in a batch of one sample, as a client's last one is with this model.batch_size"
            )
        )
        raise ConfigError(
            f"network: {name} cannot process inputs of shape {shape}{alone}: {_line(error)}"
        ) from error
    if not isinstance(outputs, Tensor):
        raise ConfigError(
            f"network: {name} returns a {type(outputs).__name__}; it must return one tensor"
        )
    if num_classes is not None and (outputs.ndim < 2 or outputs.shape[1] < num_classes):
        raise ConfigError(
            f"network: {name} gives outputs of shape {list(outputs.shape[1:])} for data "
            f"with {num_classes} classes; give it num_classes={num_classes}"
        )
    try:
        oracle.gradient(w, batch)
        _check_alone(oracle, outputs, targets)
    except ConfigError:
        raise
    except MISFITS as error:
        raise ConfigError(
            f"loss: {name_of(oracle.loss)} cannot compare outputs {list(outputs.shape)} of "
            f"{name} with targets {list(targets.shape)} ({targets.dtype}): {_line(error)}"
        ) from error


def _check_alone(oracle: Oracle, outputs: Tensor, targets: Tensor) -> None:
    """A loss that broadcasts [n, 1] against [n] compares every sample with every other."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of the same
        outputs, targets = (t.repeat_interleave(2, 0) for t in (outputs, targets))
        together, alone = (oracle.loss(outputs[:n], targets[:n]) for n in (len(targets), 1))
    if together.shape[1:] != alone.shape[1:]:
        raise ConfigError(
            f"loss: {name_of(oracle.loss)} compares outputs {list(outputs.shape)} with targets "
            f"{list(targets.shape)} all against all; give both the same shape"
        )


def _channels_last(oracle: Oracle, w: Tensor, batch: Batch) -> bool:
    """Whether the layout pays: max pooling is several times faster with it, on CPUs.

    Convolutions by tiles need it.
    """
    kinds = (nn.MaxPool2d, WinogradConv2d)
    pays = any(isinstance(m, kinds) for m in oracle.network.modules())
    if w.device.type != "cpu" or not pays or batch.inputs[0].ndim != 4:
        return False
    oracle.channels_last = True
    inputs, targets = (x.repeat_interleave(2, 1) for x in (batch.inputs, batch.targets))
    try:  # a single image may look as if it had either layout
        oracle.gradient(w, Batch(inputs, targets, [2 * n for n in batch.counts]))
    except RuntimeError:  # a network that takes views of its feature maps
        return False
    return True


def _settle(oracle: Oracle, w: Tensor, batch: Batch) -> None:
    """Choose engine and chain: what was asked for if it can, what pays if that was left open."""
    wanted, network = oracle.wanted, oracle.network
    if wanted == "sequential":
        return
    reason = _obstacle(oracle)
    if reason is None:
        # A copy, since a network may change what it is given.
        g = oracle.gradient(w, Batch(batch.inputs.clone(), batch.targets, batch.counts))[1]
        slow = wanted == "auto" and w.device.type == "cpu" and _convolves(network)
        ways: list[tuple[Engine, Chain | None]] = [("sequential" if slow else "vmap", None)]
        chain = Chain.of(network, oracle.space, batch.inputs[0])
        if chain is not None and (chain.batched or slow):
            ways.insert(0, ("vmap" if chain.batched else "sequential", chain))
        for oracle.engine, oracle.chain in ways:
            reason = _fault(oracle, w, batch, g)
            if reason is None:
                return
    if wanted == "vmap":
        raise ConfigError(
            f"engine: vmap cannot train {type(network).__name__}: {reason}; use engine: sequential"
        )
    oracle.engine, oracle.chain = "sequential", None


def _obstacle(oracle: Oracle) -> str | None:
    """Why only the engine `sequential` can run a network, known without trying."""
    if oracle.buffers.size:
        return f"it keeps running statistics ({oracle.buffers.names[0]})"
    if oracle.random:
        return "it draws random numbers (dropout)"
    modules = oracle.network.named_modules(remove_duplicate=False)
    having = [module for _, module in modules if any(True for _ in module.parameters())]
    if len(having) > len(set(having)):  # functional_call gives it back with other parameters
        return "it uses a module with parameters twice"
    return None


def _fault(oracle: Oracle, w: Tensor, batch: Batch, g: Tensor) -> str | None:
    """Why the chosen way does not give a gradient g [1, P] of the engine `sequential`; None if it does.

    Tried with a padded batch, which only `sequential` never sees: by the last sample, made another one.
    """
    other = batch.inputs[:, -1:].flip(tuple(range(2, batch.inputs.ndim)))
    if other.is_floating_point():  # and no token
        other = 2 * other + 1
    inputs = torch.cat([batch.inputs, other], 1)
    targets = torch.cat([batch.targets, batch.targets[:, -1:]], 1)
    padded = Batch(inputs, targets, batch.counts)
    try:
        with warnings.catch_warnings():
            if oracle.wanted == "auto":  # vmap is slower than `sequential` where it must make one
                warnings.filterwarnings("error", "There is a performance drop", UserWarning)
            found = oracle.gradient(w, padded)[1]
            oracle.evaluate(w, batch)
    except (*MISFITS, UserWarning) as error:
        return _line(error)
    with oracle.precision():
        rounded = w.device.type != "cpu" or torch.is_autocast_enabled(w.device.type)
    alike = (found - g).norm() <= (0.1 if rounded else 0.001) * g.norm() + 1e-6
    return None if alike or not g.isfinite().all() else "samples of a batch change each other"


def _convolves(network: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.conv._ConvNd) for m in network.modules())


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def name_of(thing: object) -> str:
    """What a function, or an object's class, is called."""
    return getattr(thing, "__name__", type(thing).__name__)


def _line(error: Exception) -> str:
    """The first line of an error that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
