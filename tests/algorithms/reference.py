"""Slow and obvious NumPy implementations of the methods: one client, one layer, one step at a time.

They share nothing with the package; where they and the package agree, both were written down
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tests.problems import Problem

Vector = np.ndarray


def soft(x: Vector, threshold: float) -> Vector:
    """Soft threshold: sign(x) max(|x| - threshold, 0)."""
    return np.sign(x) * np.maximum(np.abs(x) - threshold, 0.0)


def svt(x: Vector, threshold: float) -> Vector:
    """Singular value threshold of a matrix."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    return u @ np.diag(np.maximum(s - threshold, 0.0)) @ vt


def kernel_to_matrix(kernel: np.ndarray) -> np.ndarray:
    """W[(o, u), (i, v)] = kernel[o, i, u, v], entry by entry."""
    o, i, d1, d2 = kernel.shape
    matrix = np.empty((o * d1, i * d2))
    for index in np.ndindex(*kernel.shape):
        a, b, u, v = index
        matrix[a * d1 + u, b * d2 + v] = kernel[index]
    return matrix


def matrix_to_kernel(matrix: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The inverse of `kernel_to_matrix`."""
    kernel = np.empty(shape)
    for index in np.ndindex(*shape):
        a, b, u, v = index
        kernel[index] = matrix[a * shape[2] + u, b * shape[3] + v]
    return kernel


def layers(w: Vector, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """The parameter tensors of a flat model."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [p.reshape(s) for p, s in zip(np.split(w, ends[:-1]), shapes, strict=True)]


def matrices(w: Vector, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """The matrices whose rank counts: all layers but the 1-D ones."""
    tensors = [t for t in layers(w, shapes) if t.ndim > 1]
    return [kernel_to_matrix(t) if t.ndim == 4 else t for t in tensors]


def ranks(w: Vector, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Of these matrices, up to rounding."""
    return [int(np.linalg.matrix_rank(m, tol=1e-9)) for m in matrices(w, shapes)]


def factor_floats(w: Vector, shapes: Sequence[tuple[int, ...]]) -> int:
    """Floats of w on the wire: two factors for a matrix where they are smaller, else the layer."""
    total = sum(int(np.prod(shape)) for shape in shapes if len(shape) == 1)
    for m, r in zip(matrices(w, shapes), ranks(w, shapes), strict=True):
        total += min(r * (m.shape[0] + m.shape[1]), m.size)
    return total


def layerwise_svt(w: Vector, threshold: float, shapes: Sequence[tuple[int, ...]]) -> Vector:
    """`svt` of every matrix layer; 1-D layers stay."""
    out = []
    for tensor in layers(w, shapes):
        if tensor.ndim == 4:
            matrix = svt(kernel_to_matrix(tensor), threshold)
            tensor = matrix_to_kernel(matrix, tensor.shape)
        elif tensor.ndim == 2:
            tensor = svt(tensor, threshold)
        out.append(tensor.ravel())
    return np.concatenate(out)


def descend(
    gradient: Callable[[Vector], Vector],
    v: Vector,
    steps: int,
    lr: float,
    prox: Callable[[Vector], Vector] = lambda v: v,
) -> Vector:
    """Proximal gradient steps v <- prox(v - lr gradient(v))."""
    for _ in range(steps):
        v = prox(v - lr * gradient(v))
    return v


def fedavg(
    problem: Problem,
    w: Vector,
    trace: Sequence[Sequence[int]],
    *,
    lr: float,
    steps: int,
    lr_decay: float = 1.0,
    weight_decay: float = 0.0,
    weighting: str = "samples",
    mu: float = 0.0,
    server: Callable[[Vector, Vector], Vector] = lambda w, mean: mean,
    prox: Callable[..., Vector] = lambda v, lr: v,
) -> list[Vector]:
    """FedAvg with full gradients; FedProx with mu; LPGD with a local prox. w after each round."""
    history = []
    for t, cohort in enumerate(trace):
        eta = lr * lr_decay**t
        total, weights = np.zeros_like(w), 0.0
        for i in cohort:

            def direction(v: Vector, i: int = i, w: Vector = w) -> Vector:
                return problem.gradient(i, v) + weight_decay * v + mu * (v - w)

            v = descend(direction, w.copy(), steps, eta, partial(prox, lr=eta))
            weight = float(problem.sizes[i]) if weighting == "samples" else 1.0
            total, weights = total + weight * v, weights + weight
        if weights:
            w = server(w, total / weights)
        history.append(w)
    return history


def fedslr(
    problem: Problem,
    w: Vector,
    trace: Sequence[Sequence[int]],
    *,
    eta_g: float,
    lam: float,
    mu: float,
    lr: float,
    steps: int,
    personal_steps: int,
    lr_decay: float = 1.0,
    weight_decay: float = 0.0,
    components: tuple[str, str] = ("low_rank", "sparse"),
    personal_start: str = "zero",
) -> list[dict[str, Any]]:
    """Algorithm 2 with full gradients: the server keeps every client's gamma."""

    def prox(component: str, x: Vector, threshold: float) -> Vector:
        if component == "low_rank":
            return layerwise_svt(x, threshold, problem.shapes)
        return soft(x, threshold)

    m = problem.num_clients
    gamma, p = np.zeros((m, len(w))), np.zeros((m, len(w)))
    if personal_start == "initial":
        p[:] = np.concatenate([t.ravel() * (t.ndim > 1) for t in layers(w, problem.shapes)])
    history = []
    for t, cohort in enumerate(trace):
        eta, sent, models = lr * lr_decay**t, factor_floats(w, problem.shapes) if t else len(w), {}
        for i in cohort:

            def phase_1(v: Vector, i: int = i, w: Vector = w) -> Vector:
                g = problem.gradient(i, v) + weight_decay * v
                return g - gamma[i] + (v - w) / eta_g

            models[i] = descend(phase_1, w.copy(), steps, eta)
        for i in cohort:
            gamma[i] += (w - models[i]) / eta_g
        merged = np.mean([models[i] for i in cohort], axis=0) - eta_g * gamma.mean(0)
        for i in cohort:

            def phase_2(q: Vector, i: int = i, w: Vector = w) -> Vector:
                return problem.gradient(i, w + q) + weight_decay * q

            personal_prox = partial(prox, components[1], threshold=mu * eta)
            p[i] = descend(phase_2, p[i], personal_steps, eta, personal_prox)
        w = prox(components[0], merged, lam * eta_g)
        history.append(
            {
                "w": w,
                "gamma": gamma.copy(),
                "p": p.copy(),
                "ranks": ranks(w, problem.shapes),
                "floats down": sent,
            }
        )
    return history
