"""Families of networks for the digits, for tests in several folders."""

import numpy as np
import torch
from torch import Tensor, nn

from pfl.models import MLP, Family


class Rows(nn.Module):
    """A transformer whose tokens are the eight rows of an image of 8x8."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        z = self.blocks(self.enter(x.flatten(1).unflatten(1, (8, 8))))
        scores: Tensor = self.head(z.mean(1))
        return scores


def convolutions(rng: np.random.Generator, normalized: bool) -> nn.Module:
    """Convolutions of drawn widths, perhaps with BatchNorm, before a linear head."""
    layers: list[nn.Module] = []
    channels = 1
    for width in rng.integers(2, 6, rng.integers(1, 3)).tolist():
        layers.append(nn.Conv2d(channels, width, 3, padding=1))
        if normalized:
            layers.append(nn.BatchNorm2d(width))
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10)]
    return nn.Sequential(*layers)


def drawn(seed: int, features: int = 5, **kw: object) -> Family:
    """Networks of drawn kinds, widths and depths; a transformer and BatchNorm are among them."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    networks: dict[str, nn.Module] = {"rows": Rows(2 * int(rng.integers(2, 5)), 1)}
    networks["normalized"] = convolutions(rng, normalized=True)
    networks["images"] = convolutions(rng, normalized=False)
    for number in range(int(rng.integers(1, 3))):
        hidden = rng.integers(3, 12, rng.integers(1, 4)).tolist()
        networks[f"flat {number}"] = MLP(64, tuple(hidden))
    names = rng.permutation(list(networks)).tolist()
    chosen = {name: networks[name] for name in names}
    return Family(chosen, features=features, **kw)  # type: ignore[arg-type]


def nested() -> Family:
    """Three MLPs, each a part of the one before."""
    torch.manual_seed(3)
    sizes = {"large": (16, 12), "middle": (16, 6), "small": (16, 4)}
    return Family({name: MLP(64, hidden) for name, hidden in sizes.items()})
