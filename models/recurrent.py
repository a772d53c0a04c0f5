"""Recurrent networks for sequences of tokens: LEAF's for Shakespeare and Sentiment140."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from .classifier import Classifier


class LSTM(Classifier):
    """Stacked LSTMs over embedded tokens, and a linear head.

    The cells are LEAF's (TensorFlow's `BasicLSTMCell`): one bias for each gate, and 1 is added to
    the input of the forget gate. PyTorch has a second bias, which is frozen here and holds this 1.

    Args:
        vocabulary: The number of tokens; inputs are ids from 0 to vocabulary - 1. `embeddings`
            brings its own.
        embedding: The number of values of a token's vector; `embeddings` brings its own.
        hidden: The number of units of each LSTM.
        layers: The number of stacked LSTMs.
        features: The units of a linear layer before the head, without activation; null: no layer.
        embeddings: The path of vectors, a NumPy file [vocabulary, embedding] such as GloVe's, which
            stay as they are. null: the vectors are trained, from normal ones.
        every_token: Whether there are scores for every token, for targets [B, T]; else only after
            the last token, for targets [B].

    Shape: input token ids, int64 [B, T]; output scores [B, num_classes], or with `every_token`
    [B, num_classes, T].

    Example:
        >>> network = LSTM(vocabulary=30, num_classes=4, embedding=8, hidden=16, layers=1)
        >>> network(torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        vocabulary: int = 80,
        num_classes: int = 80,
        embedding: int = 8,
        hidden: int = 256,
        layers: int = 2,
        features: int | None = None,
        embeddings: str | None = None,
        every_token: bool = False,
    ) -> None:
        sizes = {"vocabulary": vocabulary, "embedding": embedding, "hidden": hidden}
        for name, size in {**sizes, "layers": layers, "features": features or 1}.items():
            if size < 1:
                raise ValueError(f"{type(self).__name__}.{name}: {size}; it must be at least 1")
        if embeddings is None:
            vectors = nn.Embedding(vocabulary, embedding)
        else:
            key = f"{type(self).__name__}.embeddings: {embeddings}"
            if not Path(embeddings).is_file():
                raise ValueError(f"{key}; there is no such file")
            matrix = torch.from_numpy(np.load(embeddings, allow_pickle=False)).float()
            if matrix.ndim != 2:
                shape = list(matrix.shape)
                raise ValueError(f"{key}; it must hold a matrix, and has shape {shape}")
            vectors = nn.Embedding.from_pretrained(matrix)
        body = _StackedLSTM(vectors, hidden, layers, features, every_token)
        super().__init__(body, nn.Linear(features or hidden, num_classes))
        self.every_token = every_token

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        return scores.transpose(1, 2) if self.every_token else scores


class CharLSTM(LSTM):
    """LEAF's network for Shakespeare: the next of 80 characters after a text of 80.

    Caldas et al., "LEAF: A Benchmark for Federated Settings", 2019: 8 values for each character,
    two LSTMs with 256 units, and a linear head: 817,872 parameters.

    Example:
        >>> CharLSTM()(torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 80])
    """

    def __init__(self, num_classes: int = 80, hidden: int = 256, every_token: bool = False) -> None:
        super().__init__(num_classes, num_classes, 8, hidden, every_token=every_token)


class Sent140LSTM(LSTM):
    """LEAF's network for Sentiment140: two LSTMs over the words of a tweet.

    Caldas et al., "LEAF: A Benchmark for Federated Settings", 2019: two LSTMs with 100 units, a
    linear layer with 128, and a linear head for two classes. LEAF's code trains vectors of 100
    values; with `embeddings` they are given, such as GloVe's of 300 values. LEAF's tweets have 25
    words; shorter ones end with the id of the unknown word, which `vocabulary` counts, too.

    Example:
        >>> Sent140LSTM(vocabulary=50)(torch.zeros(2, 25, dtype=torch.int64)).shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        vocabulary: int = 400_001,
        num_classes: int = 2,
        embedding: int = 100,
        hidden: int = 100,
        embeddings: str | None = None,
    ) -> None:
        super().__init__(
            vocabulary, num_classes, embedding, hidden, features=128, embeddings=embeddings
        )


class _StackedLSTM(nn.Module):
    """Token ids [B, T] to features [B, F], or [B, T, F] of every token."""

    def __init__(
        self,
        vectors: nn.Embedding,
        hidden: int,
        layers: int,
        features: int | None,
        every_token: bool,
    ) -> None:
        super().__init__()
        self.embedding = vectors
        self.lstm = nn.LSTM(vectors.embedding_dim, hidden, layers, batch_first=True)
        self.linear = nn.Identity() if features is None else nn.Linear(hidden, features)
        self.every_token = every_token
        forget = slice(hidden, 2 * hidden)  # PyTorch's gates: input, forget, cell, output
        with torch.no_grad():
            for layer in range(layers):
                getattr(self.lstm, f"bias_ih_l{layer}").zero_()
                second = getattr(self.lstm, f"bias_hh_l{layer}")
                second.zero_()[forget] = 1.0
                second.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        return self.linear(states if self.every_token else states[:, -1])
