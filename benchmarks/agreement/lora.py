"""What both sides of a comparison of LoRA's methods are given, and the other side's local steps.

The network has a square first layer, so that a transposed matrix fits it, too, and LoRA beside
that layer; in `Network` its parameters have peft's names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.agreement.problem import CLASSES, EPOCHS, FEATURES, RATE, Iterates, Problem, tensors
from datamodules.randomness import generator

RANK, SCALE = 2, 2.0  # r, and alpha / r


def first_values() -> dict[str, Tensor]:
    """The parameters of both layers, and A; B begins at 0."""
    rng = np.random.default_rng(1)
    shapes = {
        "base": (FEATURES, FEATURES),
        "base_bias": (FEATURES,),
        "head": (CLASSES, FEATURES),
        "head_bias": (CLASSES,),
        "A": (RANK, FEATURES),
    }
    return {name: torch.tensor(0.5 * rng.normal(size=shape)) for name, shape in shapes.items()}


def drawn_factor(round_index: int, client: int) -> Tensor:
    """The A that a client of FLoRA draws in a round."""
    bound = FEATURES**-0.5
    rng = generator(0, "factors", round_index, client)
    return torch.from_numpy(rng.uniform(-bound, bound, (RANK, FEATURES)))


class Adapted(nn.Module):
    """A linear layer with LoRA; with `transposed` its weight is [in, out], as GPT-2's are."""

    def __init__(self, transposed: bool, rank: int) -> None:
        super().__init__()
        first, self.transposed = first_values(), transposed
        self.base_layer = nn.Linear(FEATURES, FEATURES).double().requires_grad_(False)
        self.first = first["base"]
        self.base_layer.weight.data = self.first.T.clone() if transposed else self.first.clone()
        self.base_layer.bias.data = first["base_bias"]
        self.lora_A = nn.ModuleDict({"default": nn.Linear(FEATURES, rank, bias=False).double()})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, FEATURES, bias=False).double()})
        self.a.data = first["A"][:rank].clone()
        self.b.data.zero_()

    @property
    def a(self) -> nn.Parameter:
        return self.lora_A["default"].weight  # type: ignore[return-value]

    @property
    def b(self) -> nn.Parameter:
        return self.lora_B["default"].weight  # type: ignore[return-value]

    @property
    def base(self) -> Tensor:
        """The frozen weight, [out, in]."""
        return self.base_layer.weight.T if self.transposed else self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = SCALE * x @ self.a.T @ self.b.T
        return x @ self.base.T + self.base_layer.bias + adapted


class Network(nn.Module):
    """The network; without `head` the classifier is not trained."""

    def __init__(self, head: bool = True, transposed: bool = False, rank: int = RANK) -> None:
        super().__init__()
        first = first_values()
        self.body = Adapted(transposed, rank)
        self.classifier = nn.Linear(FEATURES, CLASSES).double().requires_grad_(head)
        self.classifier.weight.data, self.classifier.bias.data = first["head"], first["head_bias"]

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(torch.tanh(self.body(x)))
        return scores

    def train_on(self, problem: Problem, round_index: int, client: int) -> None:
        """The local steps of a client in a round."""
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=RATE)
        for epoch in range(EPOCHS):
            for batch in problem.batches("train", round_index, client, epoch):
                x, y = tensors(*batch)
                optimizer.zero_grad()
                nn.functional.cross_entropy(self(x), y).backward()
                optimizer.step()

    def row(self) -> dict[str, np.ndarray]:
        """A, B, the change D of the frozen weight, D + s B A (`update`), and the head."""
        a, b, change = self.body.a, self.body.b, self.body.base - self.body.first
        found = dict(A=a, B=b, D=change, update=change + SCALE * b @ a)
        found["head"] = nn.utils.parameters_to_vector(self.classifier.parameters())
        return {name: value.detach().numpy().copy() for name, value in found.items()}


def stacked(rows: list[dict[str, np.ndarray]]) -> Iterates:
    """The iterates of the rounds' values."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def named(network: nn.Module, found: Iterates) -> Iterates:
    """Our iterates of the trained parameters `w` [rounds, P], by the names of `Network.row`."""
    kept: dict[str, list[np.ndarray]] = {}
    places = {"lora_A": "A", "lora_B": "B", "residual": "D", "weight": "head", "bias": "head"}
    trained = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    cuts = np.cumsum([p.numel() for _, p in trained])[:-1]
    for (name, p), values in zip(trained, np.split(found["w"], cuts, axis=1), strict=True):
        last = name.rpartition(".")[2]
        place = places.get(last, last)
        shape = () if place == "head" else p.shape
        kept.setdefault(place, []).append(values.reshape(len(values), *(shape or (-1,))))
    result: dict[str, Any] = {name: np.concatenate(v, -1) for name, v in kept.items()}
    if "A" in result:
        result["update"] = SCALE * result["B"] @ result["A"] + result.get("D", 0.0)
    return found | result
