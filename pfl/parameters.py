"""A module's parameters as one flat vector, and its running statistics as another."""

from __future__ import annotations

import copy
import fnmatch
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from pfl.errors import ConfigError


@dataclass(frozen=True)
class Layer:
    """The place of one parameter tensor in the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Number of floats."""
        return prod(self.shape)

    @property
    def span(self) -> slice:
        """The place in the last dimension of a [..., P] tensor."""
        return slice(self.start, self.start + self.size)

    @property
    def matrix_shape(self) -> tuple[int, int] | None:
        """Rows and columns of the matrix that a nuclear norm acts on; None for 1-D tensors.

        A convolution o x i x d1 x d2 is the (o d1) x (i d2) matrix W[(o,u),(i,v)] = w[o,i,u,v]
        (FedSLR, footnote to Section 4, and its code); other tensors keep their first axis as rows.
        """
        if len(self.shape) < 2:
            return None
        if len(self.shape) == 4:
            o, i, d1, d2 = self.shape
            return o * d1, i * d2
        return self.shape[0], prod(self.shape[1:])

    def to_matrix(self, values: Tensor) -> Tensor:
        """Returns values [..., size] as matrices [..., rows, columns]."""
        tensor = values.reshape(*values.shape[:-1], *self.shape)
        if len(self.shape) == 4:
            tensor = tensor.transpose(-3, -2)
        assert self.matrix_shape is not None
        return tensor.reshape(*values.shape[:-1], *self.matrix_shape)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """Returns matrices [..., rows, columns] as values [..., size]; inverts `to_matrix`."""
        batch = matrix.shape[:-2]
        if len(self.shape) == 4:
            o, i, d1, d2 = self.shape
            matrix = matrix.reshape(*batch, o, d1, i, d2).transpose(-3, -2)
        return matrix.reshape(*batch, self.size)


class ParameterSpace:
    """The map between a module's trainable parameters and one flat vector of P floats.

    The module's parameters become views of `vector`, so that a change of one changes the other,
    and the module always is the global model. Frozen parameters (`requires_grad=False`) are not in
    the vector and never move; tied weights are one entry.

    Args:
        module: A module whose trainable parameters are initialized and share one floating dtype.

    Attributes:
        layers: The place of each parameter tensor in the vector.
        size: P.
        vector: The parameters, [P].

    Raises:
        ConfigError: The module has nothing to train, a lazy or complex parameter or mixed dtypes.

    Example:
        >>> space = ParameterSpace(nn.Linear(3, 2))
        >>> space.size
        8
        >>> [layer.name for layer in space.layers]
        ['weight', 'bias']
        >>> space.mask(["bias"])
        tensor([False, False, False, False, False, False,  True,  True])
        >>> space.split(torch.zeros(5, 8))["weight"].shape  # of five models
        torch.Size([5, 2, 3])
    """

    def __init__(self, module: nn.Module) -> None:
        name = type(module).__name__
        trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if not trainable:
            lost = unregistered_parameters(module)
            if lost:
                raise never_trained(name, list(lost))
            raise ConfigError(f"network: {name} has no trainable parameter; unfreeze some")
        for n, p in trainable.items():
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise ConfigError(
                    f"network: parameter {n} of {name} is lazy and has no shape yet; "
                    f"run one forward pass before, or give its sizes"
                )
            if not p.numel():
                raise ConfigError(
                    f"network: parameter {n} of {name} has the shape {[*p.shape]}; every size must "
                    f"be at least 1"
                )
            if p.is_complex():
                raise ConfigError(
                    f"network: parameter {n} of {name} is {p.dtype}; take a real parameter of the "
                    f"shape [..., 2], and torch.view_as_complex of it in forward"
                )
        for n, buffer in module.named_buffers():
            if isinstance(buffer, nn.parameter.UninitializedBuffer):
                raise ConfigError(
                    f"network: buffer {n} of {name} is lazy and has no shape yet; run one forward "
                    f"pass before, or give its sizes"
                )
        dtypes = {str(p.dtype) for p in trainable.values()}
        if len(dtypes) > 1:
            raise ConfigError(
                f"network: the parameters of {name} mix dtypes {sorted(dtypes)}; use one"
            )
        self.layers: list[Layer] = []
        start = 0
        for n, p in trainable.items():
            self.layers.append(Layer(n, tuple(p.shape), start))
            start += p.numel()
        self.size = start
        self.vector = nn.Parameter(torch.empty(0))
        self.bind(module)

    @property
    def spans(self) -> dict[str, slice]:
        """The places of the parameter tensors in the last dimension of a [..., P] tensor."""
        return {layer.name: layer.span for layer in self.layers}

    def bind(self, module: nn.Module) -> None:
        """Turns the module's parameters into views of `vector`, with the same values.

        It must be called again whenever PyTorch has replaced the parameters' storage (`.to`,
        deepcopy).
        """
        parameters = self.parameters_of(module)
        self.vector.data = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.point(parameters, self.vector.data)

    def parameters_of(self, module: nn.Module) -> list[nn.Parameter]:
        """Returns the module's parameter objects, in the order of the layers."""
        parameters = dict(module.named_parameters())
        return [parameters[layer.name] for layer in self.layers]

    def point(self, parameters: Sequence[nn.Parameter], w: Tensor) -> None:
        """Turns `parameters` into views of the vector `w` [P], without a copy."""
        for parameter, layer, values in zip(parameters, self.layers, self._pieces(w), strict=True):
            parameter.data = values.view(layer.shape)

    def split(self, w: Tensor) -> dict[str, Tensor]:
        """Returns the parameters of models w [..., P] by name, as views [..., *shape]."""
        return {
            layer.name: values.reshape(*w.shape[:-1], *layer.shape)
            for layer, values in zip(self.layers, self._pieces(w), strict=True)
        }

    def _pieces(self, w: Tensor) -> tuple[Tensor, ...]:
        return w.split([layer.size for layer in self.layers], dim=-1)

    @property
    def matrices(self) -> list[Layer]:
        """The layers with at least two dimensions."""
        return [layer for layer in self.layers if layer.matrix_shape is not None]

    @property
    def full_ranks(self) -> Tensor:
        """The largest rank each matrix layer can have, int64 [number of matrix layers]."""
        shapes = [layer.matrix_shape or (0,) for layer in self.matrices]
        return torch.tensor([min(shape) for shape in shapes], dtype=torch.int64)

    def mask(self, patterns: Sequence[str], argument: str = "parameters") -> Tensor:
        """Returns a mask, bool [P], of the parameters whose name matches a pattern.

        Args:
            patterns: Shell patterns of parameter names, such as `head.*`.
            argument: The argument that the error names.

        Raises:
            ConfigError: A pattern matches no parameter.
        """
        mask = torch.zeros(self.size, dtype=torch.bool, device=self.vector.device)
        for pattern in patterns:
            hits = [x for x in self.layers if fnmatch.fnmatchcase(x.name, pattern)]
            if not hits:
                names = ", ".join(layer.name for layer in self.layers)
                raise ConfigError(f"{argument}: {pattern!r} matches none of {names}")
            for layer in hits:
                mask[layer.span] = True
        return mask

    def moving(self, part: Tensor) -> list[bool]:
        """Returns whether each parameter lies in a part, bool [P], of whole parameters.

        Raises:
            ValueError: The part is empty, or has some of a parameter's values and not the others.
        """
        pieces = self._pieces(part.cpu())
        flags = [bool(piece.any()) for piece in pieces]
        for layer, piece, flag in zip(self.layers, pieces, flags, strict=True):
            if flag and not piece.all():
                raise ValueError(f"part: it cuts {layer.name}; take whole parameters, as of `mask`")
        if not any(flags):
            raise ValueError("part: no parameter is in it")
        return flags


def frozen_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of a module that are not trained, by name."""
    return {n: p for n, p in module.named_parameters() if not p.requires_grad}


def unregistered_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a module that want gradients, and which `parameters()` lacks, by name.

    They are attributes, or stand in lists, tuples, sets and dictionaries that are attributes, or
    belong to modules that do.
    """
    registered = {id(p) for p in module.parameters()}
    return {
        name: tensor
        for name, tensor in _tensors_in("", module, set())
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in registered
    }


def _tensors_in(place: str, thing: object, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in a module or a container, once each, with their places."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    inside: Iterable[tuple[object, object]] = ()
    if isinstance(thing, Tensor):
        yield place, thing
    elif isinstance(thing, nn.Module):
        # What PyTorch knows first: the registries are attributes, too, and hold the same.
        known = [*thing.named_parameters(recurse=False), *thing.named_children()]
        inside = [*known, *vars(thing).items()]
    elif isinstance(thing, Mapping):
        inside = thing.items()
    elif isinstance(thing, list | tuple | set | frozenset):
        inside = enumerate(thing)
    for name, value in inside:
        yield from _tensors_in(f"{place}.{name}".lstrip("."), value, seen)


def never_trained(network: str, names: Sequence[str]) -> ConfigError:
    """Returns the error of a network with parameters that `parameters()` lacks."""
    first = ", ".join(names[:3])
    return ConfigError(
        f"network: {network} would never train {first}, which its parameters() lack, as all that "
        f"stands in a Python list or dictionary; take nn.ModuleList, nn.ModuleDict or "
        f"nn.Parameter, or call requires_grad_(False) on what is to stay as it is"
    )


def refuse_computed(network: nn.Module) -> None:
    """Refuses a network with a tensor that was computed from others, which cannot be copied."""
    for name, tensor in _tensors_in("", network, set()):
        if not tensor.is_leaf:
            raise ConfigError(
                f"network: {type(network).__name__} cannot be copied, as its tensor {name} was "
                f"computed from others; it must be detached, or with torch.nn.utils.weight_norm "
                f"made by torch.nn.utils.parametrizations.weight_norm"
            )


def private_copy(module: nn.Module) -> nn.Module:
    """Returns a copy of a module that shares its frozen parameters: there is one frozen body."""
    return copy.deepcopy(module, {id(p): p for p in frozen_parameters(module).values()})


def move(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Moves a module to a device; all of it has a dtype then, but for its frozen parameters."""
    module.to(device)
    trained = [p for p in module.parameters() if p.requires_grad]
    for tensor in (*trained, *(b for b in module.buffers() if b.is_floating_point())):
        tensor.data = tensor.data.to(dtype)


def checksum(tensors: dict[str, Tensor]) -> str:
    """Returns a text by which named tensors are recognised: a checksum of all their values."""
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        values = tensor.detach().cpu().contiguous()
        total.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        total.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def redrawn(space: ParameterSpace, w: Tensor, rng: np.random.Generator) -> Tensor:
    """Returns another first model [P]: each parameter's values of w [P] in a random order."""
    v = w.clone()
    for layer in space.layers:
        v[layer.span] = w[layer.span][torch.from_numpy(rng.permutation(layer.size)).to(w.device)]
    return v


def values_in(part: Tensor, v: Tensor) -> Tensor:
    """Returns the values of models v [C, P] in a part, bool [P] or its places int64 [K], as [C, K].

    It is v[:, part], and several times as fast on a CPU. On a GPU the places of a bool are waited
    for, so that loops over local steps find them once.
    """
    return v.index_select(1, _places(part))


def replace_values_in(part: Tensor, v: Tensor, values: Tensor) -> None:
    """Writes values [C, K] into models v [C, P], in place, where a part is, as in `values_in`.

    It is v[:, part] = values, and faster on a CPU.
    """
    v.index_copy_(1, _places(part), values)


def _places(part: Tensor) -> Tensor:
    if part.dtype == torch.bool:
        return part.nonzero()[:, 0]
    return part


class BufferSpace:
    """The buffers that training changes (BatchNorm's running statistics), as one flat vector.

    Args:
        module: The network.
        names: Names of the buffers. Integer buffers (`num_batches_tracked`) are floats in the
            vector and are rounded when they are written back.
    """

    def __init__(self, module: nn.Module, names: Sequence[str] = ()) -> None:
        self.names = list(names)
        self.size = sum(b.numel() for b in self._buffers(module))

    def _buffers(self, module: nn.Module) -> list[Tensor]:
        buffers = dict(module.named_buffers())
        return [buffers[name] for name in self.names]

    def read(self, module: nn.Module, like: Tensor) -> Tensor:
        """Returns the buffers' values, [B], with the dtype and device of `like`."""
        empty = like.new_empty(0)
        return torch.cat([empty, *(b.reshape(-1).to(like) for b in self._buffers(module))])

    def write(self, module: nn.Module, values: Tensor) -> None:
        """Writes values [B] into the module's buffers."""
        for buffer, piece in zip(self._buffers(module), self._pieces(module, values), strict=True):
            if not buffer.is_floating_point():
                piece = piece.round()
            buffer.copy_(piece)

    def own(self, module: nn.Module, values: Tensor) -> dict[str, Tensor]:
        """Returns tensors by the buffers' names that have values [B], for `functional_call`.

        Floating ones are places in `values`, which change with them; integers are copies. `keep`
        writes back what has not changed in its place.
        """
        named = {}
        pieces = self._pieces(module, values)
        for name, buffer, piece in zip(self.names, self._buffers(module), pieces, strict=True):
            # Autograd would take a change of one piece for a change of all.
            named[name] = piece.data
            if not buffer.is_floating_point():
                named[name] = piece.round().to(buffer.dtype)
        return named

    def keep(self, named: dict[str, Tensor], module: nn.Module, values: Tensor) -> None:
        """Writes what lies elsewhere of the tensors of `own` into `values` [B].

        These are integers, and tensors that the network has put in the place of those it was given.
        """
        for tensor, piece in zip(named.values(), self._pieces(module, values), strict=True):
            if not tensor.is_floating_point() or tensor.data_ptr() != piece.data_ptr():
                piece.copy_(tensor)

    def _pieces(self, module: nn.Module, values: Tensor) -> list[Tensor]:
        """Returns the places of the buffers in `values` [B], in the buffers' shapes."""
        shapes = [buffer.shape for buffer in self._buffers(module)]
        parts = values.split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
