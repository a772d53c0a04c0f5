"""Networks of published set-ups that `models` does not have."""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks.peers.networks import FedAvgCNN
from pfl.models.adapters import LoRA, train_only

__all__ = ["FedAvgCNN", "FemnistCNN", "Transformer", "adapted"]


class FemnistCNN(nn.Sequential):
    """FLUTE's network for FEMNIST without its dropout: unpadded 3x3 convolutions, one pooling."""

    def __init__(self, classes: int = 62) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Linear(128, classes),
        )


class Block(nn.Module):
    """A block of a transformer: attention and two linear layers, each with LayerNorm after it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width)
        self.linear1 = nn.Linear(width, 4 * width)
        self.linear2 = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q = self._by_head(self.query(x))
        k = self._by_head(self.key(x))
        v = self._by_head(self.value(x))
        seen = nn.functional.scaled_dot_product_attention(q, k, v)
        x = self.norm1(x + self.output(seen.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.linear2(nn.functional.gelu(self.linear1(x))))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class Transformer(nn.Module):
    """A network of the size of MiniLM-L6, without its trained weights: 6 blocks of width 384."""

    def __init__(
        self, vocabulary: int = 30522, width: int = 384, blocks: int = 6, heads: int = 12
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)).mean(1))


def adapted(network: Transformer) -> nn.Module:
    """Freezes a network but for its head, and adds LoRA of rank 8 to queries and values."""
    train_only(network, LoRA(8, 16, ["query", "value"]))
    return network
