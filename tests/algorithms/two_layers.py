"""Linear networks of two layers, y = A B x + c with a head (A, c), and slow NumPy for them.

f_i(B, A, c) = mean over the client's samples of 1/2 |r|^2 with r = A B x + c - y, so that
df/dA = mean r (B x)', df/dc = mean r and df/dB = mean A' r x'.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from torch import nn

from tests.problems import Problem

INPUTS, HIDDEN, OUTPUTS = 4, 3, 2
BODY = HIDDEN * INPUTS  # values of B, the first ones of the network
SIZE = BODY + OUTPUTS * HIDDEN + OUTPUTS


def network() -> nn.Module:
    """B is `body.weight`, A and c are `head.weight` and `head.bias`."""
    layers = {"body": nn.Linear(INPUTS, HIDDEN, bias=False), "head": nn.Linear(HIDDEN, OUTPUTS)}
    return nn.Sequential(OrderedDict(layers))


def problem(sizes: Sequence[int], seed: int = 0) -> Problem:
    """Clients with random samples; `Problem.gradient` is not for two layers."""
    rng = np.random.default_rng(seed)
    features = [rng.normal(size=(n, INPUTS)) for n in sizes]
    return Problem(features, [rng.normal(size=(n, OUTPUTS)) for n in sizes], network)


def start(seed: int = 1) -> np.ndarray:
    """Initial values [P]."""
    return 0.6 * np.random.default_rng(seed).normal(size=SIZE)


def gradient(data: Problem, i: int, w: np.ndarray) -> np.ndarray:
    """Of f_i at w [P], sample by sample."""
    b, a = w[:BODY].reshape(HIDDEN, INPUTS), w[BODY:-OUTPUTS].reshape(OUTPUTS, HIDDEN)
    parts = []
    for x, y in zip(data.features[i], data.targets[i], strict=True):
        r = a @ (b @ x) + w[-OUTPUTS:] - y
        parts.append(np.concatenate([np.outer(a.T @ r, x).ravel(), np.outer(r, b @ x).ravel(), r]))
    return np.mean(parts, axis=0)


def rounds(
    data: Problem,
    w: np.ndarray,
    trace: Sequence[Sequence[int]],
    loops: Sequence[tuple[slice, int]],
    *,
    lr: float,
    lr_decay: float = 1.0,
    weight_decay: float = 0.0,
    uniform: bool = False,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """A method whose clients train parts of the model in turn; bodies are averaged, heads stay.

    Args:
        loops: The values that move, and for how many full-gradient steps, one after another.
        uniform: Whether clients weigh the same; otherwise their numbers of samples.

    Returns:
        The body [BODY] and all heads [M, P - BODY] after each round.
    """
    body, heads = w[:BODY].copy(), np.tile(w[BODY:], (data.num_clients, 1))
    history = []
    for t, cohort in enumerate(trace):
        bodies, weights = [], []
        for i in cohort:
            v = np.concatenate([body, heads[i]])
            for part, steps in loops:
                for _ in range(steps):
                    g = gradient(data, i, v) + weight_decay * v
                    v[part] -= lr * lr_decay**t * g[part]
            heads[i] = v[BODY:]
            bodies.append(v[:BODY])
            weights.append(1.0 if uniform else data.sizes[i])
        if cohort:
            body = np.average(bodies, axis=0, weights=weights)
        history.append((body.copy(), heads.copy()))
    return history
