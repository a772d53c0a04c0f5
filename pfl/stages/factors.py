"""LoRA's factors in models [..., P], and the exact means of their products."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pfl.errors import ConfigError, require
from pfl.models.adapters import LoRA, LoRALayer, Trainable, adapted_layers
from pfl.parameters import Layer, ParameterSpace

PRODUCTS = "products"
"""The name under which a server reads the mean of the clients' products."""


@dataclass(frozen=True)
class Factors:
    """Two trained factors, whose layer has the weight W + D + scale B A.

    Attributes:
        a, b: The places of A [r, in] and B [out, r] among the P values.
        residual: The place of D [out, in]; None: the layer has none.
        scale: alpha / r, with a share of it where outputs of two adapters add.
    """

    a: Layer
    b: Layer
    residual: Layer | None
    scale: float

    def of(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns A [..., r, in] and B [..., out, r] of models v [..., P], as views."""
        a, b = (v[..., x.span].unflatten(-1, x.shape) for x in (self.a, self.b))
        return a, b

    def product(self, v: Tensor) -> Tensor:
        """Returns scale B A of a model v [P], [out, in]."""
        a, b = self.of(v)
        return self.scale * b @ a


def trained_factors(network: nn.Module, space: ParameterSpace) -> list[Factors]:
    """Returns the pairs of factors of a network that are both trained."""
    places = {layer.name: layer for layer in space.layers}
    found = []
    for name, layer in adapted_layers(network).items():
        if isinstance(layer, LoRALayer):
            for kind, share in layer.shares.items():
                pair = [places.get(f"{name}.{kind}_{one}".lstrip(".")) for one in "AB"]
                if pair[0] is not None and pair[1] is not None:
                    residual = places.get(f"{name}.residual".lstrip("."))
                    found.append(Factors(pair[0], pair[1], residual, share * layer.scale))
    return found


def sum_of_products(factors: Sequence[Factors], v: Tensor, weights: Tensor) -> Tensor:
    """Returns sum_i p_i scale B_i A_i of models v [C, P] with weights p [C], all layers in one row.

    All B_i stand side by side, all p_i A_i in a stack, and the two are multiplied once.
    """
    sums = []
    for pair in factors:
        a, b = pair.of(v)
        stacked = (weights[:, None, None] * a).flatten(0, 1)
        sums.append((pair.scale * b.transpose(0, 1).flatten(1) @ stacked).flatten())
    return torch.cat(sums)


def split_products(factors: Sequence[Factors], products: Tensor) -> list[Tensor]:
    """Returns the matrices [out, in] of a row that `sum_of_products` returned."""
    shapes = [(pair.b.shape[0], pair.a.shape[1]) for pair in factors]
    pieces = products.split([out * width for out, width in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def aggregation_gap(factors: Sequence[Factors], w: Tensor, products: Tensor) -> float | None:
    """Returns |mean(B A) - mean(B) mean(A)| / |mean(B A)| over all layers; None for 0 / 0.

    Args:
        factors: The layers.
        w: The mean of the models, [P].
        products: The mean of the products, as `sum_of_products` has them.
    """
    of_means = torch.cat([pair.product(w).flatten() for pair in factors])
    size = float(products.norm())
    return float((products - of_means).norm()) / size if size else None


def with_residual(trainable: Trainable | str | None) -> Trainable | str | None:
    """Returns what is trained; where that is LoRA, with a dense update D beside the factors."""
    what = LoRA() if trainable == "lora" else copy.copy(trainable)
    if isinstance(what, LoRA):
        what.residual = True
    return what


def require_factors(factors: Sequence[Factors], method: str) -> None:
    """Refuses a network without layers whose two factors are trained.

    Raises:
        ConfigError: It has none.
    """
    if not factors:
        raise ConfigError(
            f"model.trainable: {method} aggregates LoRA's factors A and B, and the network trains "
            f"no pair of them; give lora, without freeze_a"
        )


def factor_mask(space: ParameterSpace, name: str) -> Tensor:
    """Returns a mask, bool [P], of parameters with a last name, such as `lora_A`."""
    mask = torch.zeros(space.size, dtype=torch.bool, device=space.vector.device)
    for layer in space.layers:
        mask[layer.span] = layer.name.rpartition(".")[2] == name
    return mask


class ClientRanks:
    """The ranks of the clients' factors: client i has ranks[i mod the number of ranks].

    Rows of A and columns of B beyond a client's rank are 0, where gradients keep them.

    Args:
        ranks: The ranks; None: all clients have the network's.
        factors: The layers.

    Raises:
        ConfigError: A rank is not between 1 and the network's.
    """

    def __init__(self, ranks: Sequence[int] | None, factors: Sequence[Factors]) -> None:
        most = min((pair.a.shape[0] for pair in factors), default=1)
        holds = ranks is None or (len(ranks) > 0 and all(1 <= r <= most for r in ranks))
        require("ranks", ranks, holds, f"ranks from 1 to {most}, which the network's adapters have")
        self.factors = factors
        self.ranks = np.array([most] if ranks is None else ranks)

    def of(self, ids: np.ndarray) -> Tensor:
        """Returns the ranks of clients, int64 [C]."""
        return torch.from_numpy(self.ranks[ids % len(self.ranks)])

    def truncate(self, v: Tensor, ids: np.ndarray) -> Tensor:
        """Sets what lies beyond the ranks of clients to 0 in their models v [C, P]; returns v."""
        ranks = self.of(ids).to(v.device)
        for pair in self.factors:
            beyond = torch.arange(pair.a.shape[0], device=v.device) >= ranks[:, None]
            a, b = pair.of(v)
            a.masked_fill_(beyond[..., None], 0)
            b.masked_fill_(beyond[:, None], 0)
        return v

    def sizes(self, ids: np.ndarray) -> Tensor:
        """Returns how many values the clients' factors have, int64 [C]."""
        width = sum(pair.b.shape[0] + pair.a.shape[1] for pair in self.factors)
        return self.of(ids) * width
