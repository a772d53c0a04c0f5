"""What the frameworks on PyTorch share: the network, local SGD by hand, the score."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import models
from benchmarks.peers import networks
from benchmarks.peers.task import Task


def build(name: str, arguments: dict[str, Any]) -> nn.Module:
    """A network of `models` or of `networks`, with weights drawn by PyTorch."""
    kind = getattr(models, name, None) or getattr(networks, name)
    module: nn.Module = kind(**arguments)
    return module


def network(task: Task) -> nn.Module:
    """The network with the weights that all begin with."""
    return copy_weights(build(task.network, task.arguments), task)


def copy_weights(module: nn.Module, task: Task) -> nn.Module:
    """Give a network the weights that all begin with."""
    with torch.no_grad():
        for parameter, weight in zip(module.parameters(), task.weights, strict=True):
            parameter.copy_(torch.from_numpy(weight))
    return module


def samples(task: Task, client: int) -> tuple[Tensor, Tensor]:
    """A copy of a client's inputs and targets."""
    owned = task.owned[client]
    return torch.from_numpy(task.inputs[owned]), torch.from_numpy(task.targets[owned])


def train(module: nn.Module, task: Task, inputs: Tensor, targets: Tensor) -> None:
    """A client's local epochs, written as in PyTorch's tutorials."""
    optimizer = torch.optim.SGD(module.parameters(), lr=task.rate)
    for _ in range(task.epochs):
        for chosen in torch.randperm(len(targets)).split(task.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()


@torch.no_grad()
def score(module: nn.Module, task: Task) -> tuple[int, float, float, float]:
    """Number of parameters, accuracy and mean loss on every seventh sample, way from the start."""
    module.eval()
    device = next(module.parameters()).device
    inputs, targets = task.inputs[::7], torch.from_numpy(np.ascontiguousarray(task.targets[::7]))
    pieces = [torch.from_numpy(x).to(device) for x in _pieces(inputs)]
    scores = torch.cat([module(x) for x in pieces]).cpu()
    accuracy = (scores.argmax(1) == targets).float().mean()
    loss = nn.functional.cross_entropy(scores, targets)
    ends = [p.cpu().numpy() for p in module.parameters()]
    moved = sum(np.square(p - w).sum() for p, w in zip(ends, task.weights, strict=True)) ** 0.5
    return sum(p.size for p in ends), float(accuracy), float(loss), float(moved)


def wait_for(device: str) -> None:
    """Wait until a GPU has done what it was given; a CPU has."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(device: str) -> int:
    """The most memory of a GPU that this process's tensors had; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def _pieces(inputs: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(inputs[i : i + 200]) for i in range(0, len(inputs), 200)]
