"""Slow and obvious NumPy implementations of FedCLUP and FedPD, and what their tests share.

Written from the papers' equations, one client and one step at a time; they share nothing with the
methods under test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from datamodules import Partitioner, SplitOwn, TensorDataModule
from tests.problems import Problem

Vector = np.ndarray
Batches = Sequence[Sequence[Sequence[np.ndarray]]]
"""Of round t, client i and local step k: the samples."""


# ---- quadratics ---------------------------------------------------------------------------------


def hessian(problem: Problem, i: int) -> np.ndarray:
    """H_i [P, P] of a least-squares objective: its columns are differences of gradients."""
    b = problem.gradient(i, np.zeros(problem.size))
    return np.stack([problem.gradient(i, e) - b for e in np.eye(problem.size)], axis=1)


def slope(problem: Problem, i: int) -> Vector:
    """b_i [P] of grad f_i(w) = H_i w - b_i."""
    return -problem.gradient(i, np.zeros(problem.size))


def constants(problem: Problem) -> tuple[float, float]:
    """L and μ: the extreme eigenvalues of the clients' Hessians."""
    spectra = [np.linalg.eigvalsh(hessian(problem, i)) for i in range(problem.num_clients)]
    return float(np.max(spectra)), float(np.min(spectra))


def minimizer(problem: Problem) -> Vector:
    """argmin of the unweighted mean of the f_i."""
    everyone = range(problem.num_clients)
    return np.linalg.solve(
        sum(hessian(problem, i) for i in everyone), sum(slope(problem, i) for i in everyone)
    )


def coupled_minimizer(problem: Problem, lam: float) -> tuple[Vector, np.ndarray]:
    """w [P] and w_i [M, P] of min mean_i [ f_i(w_i) + (λ/2) |w - w_i|^2 ], by one linear solve.

    Unknowns (w_1, ..., w_M, w); rows grad f_i(w_i) + λ (w_i - w) = 0 and M w - sum w_i = 0.
    """
    m, size = problem.num_clients, problem.size
    eye, a, b = np.eye(size), np.zeros(((m + 1) * size,) * 2), np.zeros((m + 1) * size)
    last = slice(m * size, None)
    for i in range(m):
        rows = slice(i * size, (i + 1) * size)
        a[rows, rows] = hessian(problem, i) + lam * eye
        a[rows, last] = -lam * eye
        a[last, rows] = -eye
        b[rows] = slope(problem, i)
    a[last, last] = m * eye
    solution = np.linalg.solve(a, b).reshape(m + 1, size)
    return solution[-1], solution[:-1]


# ---- FedCLUP ------------------------------------------------------------------------------------


def fedclup(
    problem: Problem,
    w: Vector,
    trace: Sequence[Sequence[int]],
    *,
    lam: float | Callable[[int], float],
    lr: float | Callable[[int], float],
    move: float | Callable[[int], float],
    steps: int,
    weight_decay: float = 0.0,
    by_samples: bool = False,
    batches: Batches | None = None,
) -> list[dict[str, np.ndarray]]:
    """Algorithms 1 and 2 of FedCLUP; `w` [P] and `w_i` [M, P] after each round.

    `lam` is λ, `lr` is η and `move` is the product γλ, which stays finite for λ = 0: the server
    does w <- (1 - γλ) w + γλ mean w_i. Each is a number, or a function of the round (from 0).
    """
    m = problem.num_clients
    w_i, history = np.tile(w, (m, 1)), []
    for t, cohort in enumerate(trace):
        penalty, eta, share = (x(t) if callable(x) else x for x in (lam, lr, move))
        for i in cohort:
            v = w_i[i].copy()
            for k in range(steps if batches is None else len(batches[t][i])):
                g = problem.gradient(i, v, None if batches is None else batches[t][i][k])
                v = v - eta * (g + weight_decay * v + penalty * (v - w))
            w_i[i] = v
        if len(cohort):
            weights = [problem.sizes[i] if by_samples else 1.0 for i in cohort]
            mean = np.average([w_i[i] for i in cohort], axis=0, weights=weights)
            w = w - share * (w - mean)
        history.append({"w": w, "w_i": w_i.copy()})
    return history


# ---- FedPD --------------------------------------------------------------------------------------


def fedpd(
    problem: Problem,
    w: Vector,
    talks: Sequence[bool],
    *,
    eta: float,
    lr: float = 0.0,
    steps: int,
    lr_decay: float = 1.0,
    tolerance: float | None = None,
    batches: Batches | None = None,
    refresh: int | None = None,
    gamma: float = np.inf,
    matlab: bool = False,
) -> list[dict[str, Any]]:
    """Algorithm 2 of FedPD, with Oracle I (GD or SGD) or, where `refresh` is given, Oracle II.

    `talks` says for each round whether the agents communicate. Per round: `w` = mean x_{0,i}, `x`,
    `lam`, `x0`, `g` [M, P], and how many local `steps` each agent took [M]. `matlab`: as in the
    authors' file, x0 <- x0 + η λ.
    """
    m = problem.num_clients
    x, x0 = np.tile(w, (m, 1)), np.tile(w, (m, 1))
    lam, g, history = np.zeros_like(x), np.zeros_like(x), []
    for r, talk in enumerate(talks):
        taken = np.zeros(m, int)
        for i in range(m):
            mine = None if batches is None else batches[r][i]
            if refresh is None:
                rate = lr * lr_decay**r
                x[i], taken[i] = _oracle_1(
                    problem, i, x[i], x0[i], lam[i], eta, rate, steps, tolerance, mine
                )
            else:
                if r % refresh == 0:
                    g[i] = problem.gradient(i, x[i])
                x[i], g[i] = _oracle_2(
                    problem, i, x[i], x0[i], lam[i], g[i], eta, gamma, steps, mine
                )
            lam[i] = lam[i] + (x[i] - x0[i]) / eta
            x0[i] = (x0[i] if matlab else x[i]) + eta * lam[i]
        if talk:
            x0[:] = x0.mean(0)
        row = {"x": x, "lam": lam, "x0": x0, "g": g, "w": x0.mean(0), "steps": taken}
        history.append({name: value.copy() for name, value in row.items()})
    return history


def _oracle_1(problem, i, x, x0, lam, eta, lr, steps, tolerance, batches):
    """x <- x - η1 [grad f_i(x) + λ + (x - x0) / η], until the residual is small; steps taken."""
    for q in range(steps if batches is None else len(batches)):
        g = problem.gradient(i, x, None if batches is None else batches[q])
        residual = g + lam + (x - x0) / eta
        if tolerance is not None and residual @ residual <= tolerance:
            return x, q
        x = x - lr * residual
    return x, steps if batches is None else len(batches)


def _oracle_2(problem, i, x, x0, lam, g, eta, gamma, steps, batches):
    """x+ minimizes <g + λ, x> + |x - x0|^2 / (2η) + |x - x_q|^2 / (2γ); g follows by h(x+) - h(x).

    Both gradients of the change are of the same samples.
    """
    for q in range(steps if batches is None else len(batches)):
        samples = None if batches is None else batches[q]
        new = (x0 / eta + x / gamma - (g + lam)) / (1 / eta + 1 / gamma)
        g = g + problem.gradient(i, new, samples) - problem.gradient(i, x, samples)
        x = new
    return x, g


# ---- data ---------------------------------------------------------------------------------------


class GivenSizes(Partitioner):
    """The samples in their order: the first n_0 for client 0, and so on; others have none."""

    def __init__(self, sizes: np.ndarray) -> None:
        self.sizes = sizes

    def owners(self, targets: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def describe(self) -> str:
        return "given sizes"


def with_an_idle_client(problem: Problem) -> TensorDataModule:
    """The problem's data, and one more client that has no samples."""
    return TensorDataModule(
        torch.from_numpy(np.concatenate(problem.features)),
        torch.from_numpy(np.concatenate(problem.targets)),
        num_clients=problem.num_clients + 1,
        partition=GivenSizes(problem.sizes),
        protocol=SplitOwn(test=0.0, validation=0.0),
    )


# ---- what is watched ----------------------------------------------------------------------------


class Stop(pl.Callback):
    """Ends training after some rounds, as if the time were up."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.rounds


def assert_rounds(
    actual: Sequence[dict], expected: Sequence[dict], *names: str, atol=1e-11
) -> None:
    """These entries are the same in every round."""
    assert len(actual) == len(expected)
    for t, (one, other) in enumerate(zip(actual, expected, strict=True)):
        for name in names:
            np.testing.assert_allclose(
                one[name], other[name], rtol=0, atol=atol, err_msg=f"{name}, round {t + 1}"
            )
