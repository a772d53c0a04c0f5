"""A chain of coordinates, of which each is behind the one before: FedPD's Claim 2.1.

`PYTHONPATH=examples pfl reproduce results/fedpd-chain` runs it.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from pfl.datamodules import TheoryProblem


class Chain(nn.Module):
    """f_i(x) of the agents whose number i the inputs hold, [B, 1] -> [B, 1], with x = 0 at first.

    F(x) = -Ψ(1) Φ(x_1) + Σ_j Ψ(-x_{j-1}) Φ(-x_j) - Ψ(x_{j-1}) Φ(x_j) for j = 2, ..., `length`, with
    Ψ(z) = 1 - exp(-z^2) for z > 0, else 0, and Φ(z) = 4 arctan(z) + 2π. Agents with an even number
    have twice the terms of odd j, the others twice those of even j, so that F is the mean. Only the
    agent with term j can make x_j differ from 0, and only where x_{j-1} does.
    """

    def __init__(self, length: int = 12) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(length))

    def forward(self, agents: Tensor) -> Tensor:
        x = self.x
        links = psi(-x[:-1]) * phi(-x[1:]) - psi(x[:-1]) * phi(x[1:])
        terms = torch.cat([-psi(torch.ones_like(x[:1])) * phi(x[:1]), links])
        return 2 * torch.where(agents % 2 == 0, terms[0::2].sum(), terms[1::2].sum())


def psi(z: Tensor) -> Tensor:
    """Ψ."""
    return -torch.expm1(-z.clamp(min=0).square())


def phi(z: Tensor) -> Tensor:
    """Φ."""
    return 4 * torch.arctan(z) + 2 * math.pi


class Value(nn.Module):
    """The network's output as the loss."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0]


class Agents(TheoryProblem):
    """Each agent has one sample, its number."""

    def __init__(self, num_clients: int = 10) -> None:
        super().__init__(num_clients, (1, 0, 0), seed=0)

    def draw(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([[float(client)]]), np.zeros(1)

    def rule(self) -> str:
        return "the terms of a chain, odd and even ones apart"
