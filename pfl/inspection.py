"""What an oracle must know of its network and loss, found out by running a few samples."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from pfl.batch import Batch
from pfl.chain import Chain
from pfl.errors import ConfigError
from pfl.parameters import BufferSpace
from pfl.randomness import isolated
from pfl.winograd import WinogradConv2d, install

if TYPE_CHECKING:
    from pfl.oracle import Oracle

Engine = Literal["auto", "loop", "vmap"]
MISFITS = (RuntimeError, ValueError, IndexError, TypeError)


def inspect(oracle: Oracle, inputs: Tensor, targets: Tensor, num_classes: int | None) -> None:
    """Settle engine, layout, changing buffers and randomness; see `Oracle.inspect`."""
    oracle.to(inputs.device, oracle.space.vector.dtype)
    w = oracle.space.vector.detach().clone()[None]
    batch = Batch(inputs[None], targets[None], [len(inputs)])
    before = {n: b.clone() for n, b in oracle.network.named_buffers()}
    oracle.engine, oracle.channels_last, oracle.chain = "loop", False, None
    if inputs.device.type == "cpu" and oracle.wanted != "vmap":
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
    moved = {n.rpartition(".")[0] for n, b in now.items() if not torch.equal(b, before[n])}
    changed = [n for n in now if n.rpartition(".")[0] in moved]
    with torch.no_grad():
        for name, buffer in oracle.network.named_buffers():
            buffer.copy_(before[name])
    oracle.buffers = BufferSpace(oracle.network, changed)
    oracle.chain = _chain(oracle, inputs)
    oracle.engine = _settle(oracle, w, batch)


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
        raise ConfigError(
            f"network: {name} cannot process inputs of shape {shape}: {_line(error)}"
        ) from error
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
    try:
        oracle.gradient(w, batch)
    except RuntimeError:  # a network that takes views of its feature maps
        return False
    return True


def _chain(oracle: Oracle, inputs: Tensor) -> Chain | None:
    """The network as a chain, where that is faster than the engines' general way."""
    chain = None if oracle.wanted == "loop" else Chain.of(oracle.network, oracle.space, inputs)
    if chain is None or chain.batched:
        return chain
    return chain if oracle.wanted == "auto" and inputs.device.type == "cpu" else None


def _settle(oracle: Oracle, w: Tensor, batch: Batch) -> Engine:
    """The engine that runs: what was asked for if it can, what pays if that was left open."""
    wanted = oracle.wanted
    if wanted == "loop":
        return "loop"
    network, reason = type(oracle.network).__name__, None
    if oracle.buffers.size:
        reason = f"it keeps running statistics ({oracle.buffers.names[0]})"
    elif oracle.random:
        reason = "it draws random numbers (dropout)"
    elif wanted == "auto" and w.device.type == "cpu" and _convolves(oracle.network):
        return "loop"
    else:
        oracle.engine = "vmap"
        try:
            oracle.gradient(w, batch)
        except RuntimeError as error:
            reason = _line(error)
    if reason is None:
        return "vmap"
    if wanted == "auto":
        return "loop"
    raise ConfigError(f"engine: vmap cannot train {network}: {reason}; use engine: loop")


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
