"""AvivSham/pFedHN, the code of pFedHN's authors: its training function, whole.

Replaced are the networks (the last layers of their hypernetwork fit one network for CIFAR; here one
layer returns all values) and their first values, the draws of a client and of mini-batches, and the
evaluation.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    EVERYONE,
    ONE_EACH,
    RATE,
    ROUNDS,
    Iterates,
    Problem,
    first_network,
    hypernetwork,
    main,
    tensors,
    vector,
)

EMBEDDING, WIDTH, HIDDEN_LAYERS, STEPS = 3, 6, 2, 4


class Next:
    """The next mini-batch of a client each time that it is iterated over."""

    def __init__(self, problem: Problem, client: int) -> None:
        self.coming: list[Any] = []
        for now, cohort in enumerate(ONE_EACH):
            if client in cohort:
                epochs = [problem.batches("train", now, client, k) for k in range(STEPS)]
                self.coming += [batch for epoch in epochs for batch in epoch][:STEPS]

    def __iter__(self) -> Iterator[Any]:
        return iter([tensors(*self.coming.pop(0))])


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The models of all clients."""
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(checkout))
    there: Any = importlib.import_module("experiments.pfedhn.trainer")
    shapes = {name: value.shape for name, value in first_network(problem.start).named_parameters()}

    class Hypernetwork(there.CNNHyper):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for name in set(self._modules) - {"embeddings", "mlp"}:
                del self._modules[name]
            self.last = nn.Linear(WIDTH, len(problem.start))
            first = hypernetwork(sum(value.numel() for value in self.parameters()))
            nn.utils.vector_to_parameters(torch.from_numpy(first), self.parameters())

        def forward(self, idx: torch.Tensor) -> OrderedDict[str, torch.Tensor]:
            values = self.last(self.mlp(self.embeddings(idx)))[0]
            parts = values.split([shape.numel() for shape in shapes.values()])
            return OrderedDict(
                (name, part.view(shape))
                for (name, shape), part in zip(shapes.items(), parts, strict=True)
            )

    rows: list[np.ndarray] = []

    def evaluated(nodes: Any, num_nodes: int, hnet: Any, *args: Any, split: str) -> Any:
        if split == "test":
            rows.append(np.stack([vector(hnet(torch.tensor([i])).values()) for i in EVERYONE]))
        return {}, 0.0, 0.0, [0.0]

    there.BaseNodes = lambda *args, **kwargs: SimpleNamespace(
        train_loaders=[Next(problem, i) for i in EVERYONE],
        test_loaders=[[tensors(*problem.batches("full", 0, i, 0)[0])] for i in EVERYONE],
    )
    there.CNNHyper, there.CNNTarget = Hypernetwork, lambda n_kernels: first_network(problem.start)
    there.eval_model, there.trange = evaluated, partial(there.trange, disable=True)
    clients = iter(ONE_EACH)
    there.random = SimpleNamespace(choice=lambda nodes: next(clients)[0])
    with tempfile.TemporaryDirectory() as folder:
        there.train(
            "cifar10",
            "",
            2,
            len(EVERYONE),
            steps=ROUNDS,
            inner_steps=STEPS,
            optim="sgd",
            lr=RATE,
            inner_lr=RATE,
            embed_lr=None,
            wd=0.01,
            inner_wd=0.02,
            embed_dim=EMBEDDING,
            hyper_hid=WIDTH,
            n_hidden=HIDDEN_LAYERS,
            n_kernels=1,
            bs=4,
            device="cpu",
            eval_every=1,
            save_path=Path(folder),
            seed=0,
        )
    return {"pFedHN": {"v": np.stack(rows)}}


if __name__ == "__main__":
    main(theirs)
