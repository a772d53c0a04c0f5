"""What of a network is trained: adapters beside frozen layers, or some of its own parameters.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022; Houlsby et al.,
"Parameter-Efficient Transfer Learning for NLP", ICML 2019 (bottlenecks); Lester, Al-Rfou, Constant,
"The Power of Scale for Parameter-Efficient Prompt Tuning", EMNLP 2021; Ben Zaken, Goldberg,
Ravfogel, "BitFit", ACL 2022 (biases). Plain PyTorch, for any network, by the names of its layers.

Every adapter takes parameters with one axis more, [C, ...], too: C models then run at once, and the
rows of a batch belong to them in turn, the same number to each.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .classifier import head_name, replace_layer

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x W' + b for one model, or for C models that have the rows of `x` in turn.

    Args:
        x: [n, ..., in].
        weight: [out, in], or [C, out, in].
        bias: [out], or [C, out].

    Example:
        >>> x, weight = torch.ones(4, 5, 3), torch.stack([torch.ones(2, 3), torch.zeros(2, 3)])
        >>> linear(x, weight)[:, 0, 0]
        tensor([3., 3., 0., 0.])
    """
    models = [p for p, axes in ((weight, 2), (bias, 1)) if p is not None and p.ndim > axes]
    if not models:
        return nn.functional.linear(x, weight, bias)
    y = x.reshape(len(models[0]), -1, x.shape[-1]) @ weight.mT
    if bias is not None and bias.ndim == 2:
        y = y + bias[:, None]
    elif bias is not None:
        y = y + bias
    return y.view(*x.shape[:-1], weight.shape[-2])


class AdaptedLayer(nn.Module):
    """A frozen layer `base` with an adapter, for code that calls it or reads its `weight`.

    Args:
        base: The layer.
    """

    base: Any  # any layer with a weight

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.transposed = type(base).__name__ == "Conv1D"  # of GPT-2: its weight is [in, out]
        shape = tuple(self.base.weight.shape)
        self.out_features, self.in_features = shape[::-1] if self.transposed else shape[:2]

    def new(self, *shape: int, zero: bool = False) -> nn.Parameter:
        """Returns an adapter's parameter: zeros, or uniform in ±1/sqrt(last axis), as `nn.Linear`.

        It is float32 beside a layer of 16 bits.
        """
        like = self.base.weight
        dtype = like.dtype if like.dtype.itemsize >= 4 else torch.float32
        bound = 1 / math.sqrt(shape[-1])
        if zero:
            bound = 0.0
        values = torch.empty(shape, dtype=dtype, device=like.device)
        return nn.Parameter(values.uniform_(-bound, bound))

    def update(self) -> Tensor:
        """Returns what the adapter adds to the layer's weight, of its shape."""
        raise ValueError(f"{type(self).__name__} is not a change of a weight, and cannot be merged")

    @property
    def weight(self) -> Tensor:
        """The layer's weight with the adapter's part."""
        return self.base.weight + self.update().to(self.base.weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        """The layer's bias."""
        return self.base.bias


class LoRALayer(AdaptedLayer):
    """W x + alpha / r B A x, with A [r, in] and B [out, r]; with a pair a B A x + (1 - a) B' A' x.

    A is drawn as peft draws it, uniformly in ±1/sqrt(in), and B begins at 0.

    Args:
        base: A linear layer, or GPT-2's `Conv1D`.
        rank: r.
        alpha: The factor alpha.
        pair: a, the share of the first of two adapters; None: there is one.
        freeze_a: Whether A keeps its first values.
        residual: Whether W has a dense update D [out, in], from 0 (`residual`), beside the factors.

    Shape:
        Those of the layer.
    """

    def __init__(
        self,
        base: nn.Module,
        rank: int,
        alpha: float,
        pair: float | None,
        freeze_a: bool,
        residual: bool,
    ) -> None:
        super().__init__(base)
        self.shares = {"lora": 1.0}
        if pair is not None:
            self.shares = {"lora": pair, "own": 1 - pair}
        self.scale = alpha / rank
        for name in self.shares:
            setattr(self, f"{name}_A", self.new(rank, self.in_features))
            setattr(self, f"{name}_B", self.new(self.out_features, rank, zero=True))
            getattr(self, f"{name}_A").requires_grad = not freeze_a
        self.residual: nn.Parameter | None = None
        if residual:
            self.residual = self.new(self.out_features, self.in_features, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if self.residual is not None:
            y = y + linear(x.to(self.residual.dtype), self.residual).to(y.dtype)
        for name, share in self.shares.items():
            a = getattr(self, f"{name}_A")
            b = getattr(self, f"{name}_B")
            y = y + linear(linear(x.to(a.dtype), a) * (share * self.scale), b).to(y.dtype)
        return y

    def update(self) -> Tensor:
        parts = [
            share * self.scale * getattr(self, f"{name}_B") @ getattr(self, f"{name}_A")
            for name, share in self.shares.items()
        ]
        if self.residual is not None:
            parts.append(self.residual)
        total = torch.stack(parts).sum(0)
        return total.mT if self.transposed else total

    def extra_repr(self) -> str:
        """Returns what the checksum of a network's layers must tell apart."""
        return f"scale={self.scale:g}, shares={self.shares}"


class DeltaLayer(AdaptedLayer):
    """A layer with the weight W + D, where D (`delta`) begins at 0 and has the shape of W."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__(base)
        self.delta = self.new(*self.base.weight.shape, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.delta.to(self.base.weight.dtype)
        if isinstance(self.base, nn.Linear):
            return linear(x, weight, self.base.bias)
        return functional_call(self.base, {"weight": weight}, (x,))

    def update(self) -> Tensor:
        return self.delta


class BottleneckLayer(AdaptedLayer):
    """y + U relu(V y) after a layer's output y, with V [size, out], and U [out, size] from 0."""

    def __init__(self, base: nn.Module, size: int) -> None:
        super().__init__(base)
        self.down = self.new(size, self.out_features)
        self.up = self.new(self.out_features, size, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        hidden = linear(y.to(self.down.dtype), self.down).relu()
        return y + linear(hidden, self.up).to(y.dtype)


class Trainable:
    """What of a network is trained, a part of its own parameters: `head`, `bias`, `norm` or `all`.

    Args:
        part: "head", the head alone; "bias", all biases; "norm", the parameters of normalization
            layers; "all", everything.
        head: Whether the head is trained, too.

    Example:
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        >>> Trainable("norm").apply(network)
        >>> [name for name, p in network.named_parameters() if p.requires_grad]
        ['1.weight', '1.bias', '2.weight', '2.bias']
    """

    def __init__(self, part: str = "all", head: bool = True) -> None:
        if part not in PARTS:
            raise ValueError(f"Trainable.part: {part!r}; it must be one of {', '.join(PARTS)}")
        self.part = part
        self.head = head

    def apply(self, network: nn.Module) -> None:
        """Freezes all of a network, in place, but what is trained.

        Raises:
            ValueError: The network has adapters already, or does not have what is asked for.
        """
        for module in network.modules():
            if isinstance(module, AdaptedLayer) or type(module).__module__.startswith("peft."):
                raise ValueError(
                    f"{type(network).__name__} has adapters already ({type(module).__name__}); "
                    f"give the network itself, or train it as it is, without `trainable`"
                )
        # A network whose `head` is None has none: a language model predicts by its embedding.
        has_head = self.head and getattr(network, "head", network) is not None
        name = head_name(network) if has_head else None
        network.requires_grad_(False)
        self.insert(network, name)
        if name is not None:
            head = network.get_submodule(name).requires_grad_(True)
            if any(p.dtype.itemsize < 4 for p in head.parameters()):
                head.float()

    def insert(self, network: nn.Module, head: str | None) -> None:
        """Puts adapters into a frozen network, or unfreezes some of its parameters.

        Args:
            network: The network.
            head: The name of its head, which is trained as it is; None: there is none.
        """
        chosen = [p for name, p in _owned(network) if PARTS[self.part](*name)]
        if not chosen and self.part != "head":
            raise ValueError(f"{type(network).__name__} has no parameter for {self.part!r}")
        for parameter in chosen:
            parameter.requires_grad = True


PARTS: dict[str, Callable[[str, nn.Module], bool]] = {
    "head": lambda name, owner: False,
    "bias": lambda name, owner: name.rpartition(".")[2].endswith("bias"),
    "norm": lambda name, owner: "norm" in type(owner).__name__.lower(),
    "all": lambda name, owner: True,
}


class _Layers(Trainable):
    """Adapters of the layers whose names match.

    Args:
        layers: Shell patterns of the layers' names, whole ones or their last parts.
        head: Whether the head is trained, too.
        last_blocks: Only layers in the last blocks, and after them, get adapters; None: all do.
    """

    kinds: tuple[type, ...] = (nn.Linear,)

    def __init__(
        self, layers: Sequence[str] = ("*",), head: bool = True, last_blocks: int | None = None
    ) -> None:
        super().__init__("head", head)
        if isinstance(layers, str):
            layers = (layers,)
        self.layers = layers
        self.last_blocks = last_blocks

    def insert(self, network: nn.Module, head: str | None) -> None:
        who = type(self).__name__
        all_layers = list(self._candidates(network, head))
        known = sorted({name.rpartition(".")[2] for name, _ in all_layers})
        there = f"which end in {', '.join(known)}"
        if not known:
            kinds = " or ".join(kind.__name__ for kind in self.kinds)
            there = f"which has no {kinds} besides its head"
        chosen: dict[str, nn.Module] = {}
        for pattern in self.layers:
            hits = {
                name: layer
                for name, layer in all_layers
                if fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)
            }
            if not hits:
                raise ValueError(
                    f"{who}.layers: {pattern!r} matches none of the layers of "
                    f"{type(network).__name__}, {there}"
                )
            chosen |= hits
        for name, layer in chosen.items():
            replace_layer(network, name, self.wrap(name, layer))

    def _candidates(self, network: nn.Module, head: str | None) -> Iterator[tuple[str, nn.Module]]:
        """Yields the layers that can have adapters: not the head, nor those before the blocks."""
        modules = list(network.named_modules())
        begin = 0
        if self.last_blocks is not None:
            blocks = block_names(network)
            if not 1 <= self.last_blocks <= len(blocks):
                raise ValueError(
                    f"{type(self).__name__}.last_blocks: {self.last_blocks}; "
                    f"{type(network).__name__} has {len(blocks)} blocks"
                )
            begin = [name for name, _ in modules].index(blocks[-self.last_blocks])
        for name, layer in modules[begin:]:
            is_layer = isinstance(layer, self.kinds) or type(layer).__name__ == "Conv1D"
            if is_layer and name and name != head and not name.startswith(f"{head}."):
                yield name, layer

    def wrap(self, name: str, layer: nn.Module) -> AdaptedLayer:
        """Returns a layer with its adapter."""
        raise NotImplementedError


class LoRA(_Layers):
    """Low-rank adapters of linear layers: W + alpha / r B A, with A and B trained.

    Two pairs of factors with the same product are the same model. A distance between factors (as in
    Ditto, FedProx or pFedMe) is not one between models, and a mixture or a mean of factors not that
    of the updates B A; `Delta` trains the update itself.

    Args:
        rank: r.
        alpha: The factor alpha.
        layers: As in `Delta`.
        head: Whether the head is trained, too.
        last_blocks: As in `Delta`.
        freeze_a: Whether A keeps its first values, so that the mean of B is the exact mean of the
            updates (FFA-LoRA).
        pair: a: each layer has two adapters whose outputs add, a times that of `lora_A`, `lora_B`
            and 1 - a times that of `own_A`, `own_B`. None: one adapter.

    Raises:
        ValueError: An argument is out of its range, or does not fit the network.

    Example:
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> LoRA(rank=2, layers=["0"]).apply(network)
        >>> [name for name, p in network.named_parameters() if p.requires_grad]
        ['0.lora_A', '0.lora_B', '2.weight', '2.bias']
    """

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 16.0,
        layers: Sequence[str] = ("*",),
        head: bool = True,
        last_blocks: int | None = None,
        freeze_a: bool = False,
        pair: float | None = None,
    ) -> None:
        super().__init__(layers, head, last_blocks)
        if rank < 1:
            raise ValueError(f"LoRA.rank: {rank}; it must be at least 1")
        if not 0 < alpha < math.inf:
            raise ValueError(f"LoRA.alpha: {alpha}; it must be positive and finite")
        if pair is not None and not 0 < pair < 1:
            raise ValueError(f"LoRA.pair: {pair}; it must be between 0 and 1")
        self.rank = rank
        self.alpha = alpha
        self.freeze_a = freeze_a
        self.pair = pair
        self.residual = False  # set by methods whose server moves the frozen weight

    def wrap(self, name: str, layer: nn.Module) -> LoRALayer:
        least = min(layer.weight.shape)  # type: ignore[arg-type]
        if self.rank > least:
            raise ValueError(f"LoRA.rank: {self.rank}; the layer {name} has at most rank {least}")
        return LoRALayer(layer, self.rank, self.alpha, self.pair, self.freeze_a, self.residual)


class Delta(_Layers):
    """A dense update of linear layers and convolutions: W + D.

    FedSLR, LPGD and GPGD then act on the updates of the layers: FedSLR has a shared update of low
    rank, and a sparse one of each client.

    Args:
        layers: Shell patterns of the layers' names, whole ones or their last parts.
        head: Whether the head is trained, too.
        last_blocks: Only layers in the last blocks of the network, and after them, get adapters;
            None: all do. Blocks are the longest list of modules of one class.

    Raises:
        ValueError: An argument does not fit the network.

    Example:
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> Delta(layers=["0"], head=False).apply(network)
        >>> [(name, p.shape) for name, p in network.named_parameters() if p.requires_grad]
        [('0.delta', torch.Size([4, 6]))]
    """

    kinds = (nn.Linear, *CONVOLUTIONS)

    def wrap(self, name: str, layer: nn.Module) -> DeltaLayer:
        return DeltaLayer(layer)


class Bottleneck(_Layers):
    """Adapters after linear layers: y + U relu(V y).

    Args:
        size: The number of values between V and U.
        layers: As in `Delta`.
        head: Whether the head is trained, too.
        last_blocks: As in `Delta`.

    Raises:
        ValueError: An argument does not fit the network.

    Example:
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> Bottleneck(size=3, layers=["0"], head=False).apply(network)
        >>> sum(p.numel() for p in network.parameters() if p.requires_grad)  # 3 x 4 twice
        24
    """

    def __init__(
        self,
        size: int = 16,
        layers: Sequence[str] = ("*",),
        head: bool = True,
        last_blocks: int | None = None,
    ) -> None:
        super().__init__(layers, head, last_blocks)
        if size < 1:
            raise ValueError(f"Bottleneck.size: {size}; it must be at least 1")
        self.size = size

    def wrap(self, name: str, layer: nn.Module) -> BottleneckLayer:
        return BottleneckLayer(layer, self.size)


class SoftPrompt(Trainable):
    """Trained vectors before the embedded tokens of each text; the network is a `Pretrained`.

    Args:
        length: The number of vectors.
        head: Whether the head is trained, too.

    Raises:
        ValueError: The network takes no prompt.

    Example:
        >>> from torch import nn
        >>> SoftPrompt(length=4).apply(nn.Linear(2, 2))
        Traceback (most recent call last):
        ValueError: SoftPrompt: Linear takes no prompt; use Pretrained
    """

    def __init__(self, length: int = 8, head: bool = True) -> None:
        super().__init__("head", head)
        if length < 1:
            raise ValueError(f"SoftPrompt.length: {length}; it must be at least 1")
        self.length = length

    def insert(self, network: nn.Module, head: str | None) -> None:
        add = getattr(network, "add_prompt", None)
        if add is None:
            raise ValueError(
                f"SoftPrompt: {type(network).__name__} takes no prompt; use Pretrained"
            )
        add(self.length)


WORDS: dict[str, Callable[[], Trainable]] = {
    "lora": LoRA,
    "delta": Delta,
    "adapter": Bottleneck,
    "prompt": SoftPrompt,
    **{part: (lambda part=part: Trainable(part)) for part in PARTS},  # type: ignore[misc]
}
"""What a word stands for in the place of a `Trainable`."""


def train_only(network: nn.Module, what: Trainable | str) -> None:
    """Freezes a network, in place, but for adapters or a part of it, which alone are trained.

    Args:
        network: The network.
        what: A `Trainable`, or one of the `WORDS`.

    Raises:
        ValueError: There is no such word, or it does not fit the network.
    """
    if isinstance(what, str):
        if what not in WORDS:
            raise ValueError(f"{what!r}; it must be one of {', '.join(WORDS)}, or a class, as LoRA")
        what = WORDS[what]()
    what.apply(network)


def adapted_layers(network: nn.Module) -> dict[str, AdaptedLayer]:
    """Returns the layers with adapters, by name."""
    return {n: m for n, m in network.named_modules() if isinstance(m, AdaptedLayer)}


def merged(network: nn.Module) -> nn.Module:
    """Returns a copy of a network whose adapters are part of the weights of its own layers.

    Raises:
        ValueError: An adapter is not a change of a weight, or changes one that is used elsewhere,
            too, without the adapter.
    """
    network = copy.deepcopy(network)
    for name, layer in adapted_layers(network).items():
        if _is_shared(network, layer):
            raise ValueError(f"another layer has the weight of {name}, and it cannot be merged")
        with torch.no_grad():
            layer.base.weight.copy_(layer.weight)
        replace_layer(network, name, layer.base)
    return network


def _is_shared(network: nn.Module, layer: AdaptedLayer) -> bool:
    """Returns whether a network uses the weight of an adapted layer without the adapter, too."""
    for module in network.modules():
        if module is layer:
            continue
        if any(child is layer.base for child in module.children()):
            return True
        own = module.parameters(recurse=False)
        if module is not layer.base and any(p is layer.base.weight for p in own):
            return True
    return False


def block_names(network: nn.Module) -> list[str]:
    """Returns the names of a network's blocks: the longest list of modules of one class.

    Example:
        >>> layer = lambda: nn.TransformerEncoderLayer(8, 2)
        >>> block_names(nn.Sequential(nn.Linear(3, 8), nn.ModuleList([layer(), layer()])))
        ['1.0', '1.1']
    """
    best: list[str] = []
    for name, module in network.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = list(module.named_children())
            same = len({type(child) for _, child in children}) == 1
            composed = same and any(True for _ in children[0][1].children())
            if composed and len(children) > len(best):
                best = [f"{name}.{child}".lstrip(".") for child, _ in children]
    return best


def _owned(network: nn.Module) -> Iterator[tuple[tuple[str, nn.Module], nn.Parameter]]:
    """Yields a network's parameters with their names and the modules that own them."""
    for name, parameter in network.named_parameters():
        yield (name, network.get_submodule(name.rpartition(".")[0])), parameter
