"""Slow and obvious NumPy versions of FedAgg and FedACS: a client, an epoch, a pair at a time."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.problems import Problem

Vector = np.ndarray
Batches = Callable[[int, int, int], Sequence[np.ndarray | None]]


# ---- FedAgg's control problem -------------------------------------------------------------------


def best_rates(w: Vector, phi: np.ndarray, path: np.ndarray, penalty: float) -> Vector:
    """The rates η of the epochs that are left, by dense least squares on the cost itself.

    The cost Σ_r α η_r² + (1-α) Σ_k |w_k - φ2_k|² under w_{k+1} = w_k - η_k φ1_k is the square of
    residuals that are affine in η; no normal equations, no multipliers.

    Args:
        w: Where the client is now, w_0 [P].
        phi: φ1 of the epochs that are left, [n, P].
        path: φ2 at their beginning and at the end of the last, [n + 1, P]. The first does not
            matter.
    """
    n, size = phi.shape
    matrix, right = [], []
    for r in range(n):
        row = np.zeros(n)
        row[r] = np.sqrt(penalty)
        matrix.append(row)
        right.append(0.0)
    for k in range(1, n + 1):
        for entry in range(size):  # w_0 - Σ_{r<k} η_r φ_r - φ2_k
            row = np.zeros(n)
            row[:k] = np.sqrt(1 - penalty) * phi[:k, entry]
            matrix.append(row)
            right.append(np.sqrt(1 - penalty) * (w - path[k])[entry])
    return np.linalg.lstsq(np.array(matrix), np.array(right), rcond=None)[0]


def gram(phi: np.ndarray) -> np.ndarray:
    """M_rs = φ_r'φ_s (L - max(r, s))."""
    n = len(phi)
    return np.array(
        [[phi[r] @ phi[s] * (n - max(r, s)) for s in range(n)] for r in range(n)]
    ).reshape(n, n)


def damped(eta: Vector, phi: np.ndarray, penalty: float) -> Vector:
    """One iteration of the mean field where φ1 stays: η <- (I + c M)^-1 c M η."""
    m = (1 - penalty) / penalty * gram(phi)
    return np.linalg.solve(np.eye(len(phi)) + m, m @ eta)


def walk(w: Vector, phi: np.ndarray, eta: Vector) -> np.ndarray:
    """w_0, ..., w_L under w_{k+1} = w_k - η_k φ_k."""
    return np.stack([w - eta[:k] @ phi[:k] for k in range(len(phi) + 1)])


# ---- FedAgg -------------------------------------------------------------------------------------


def fedagg(
    problem: Problem,
    w: Vector,
    trace: Sequence[Sequence[int]],
    *,
    lr: float,
    epochs: int,
    penalty: float,
    max_rate: float = 1.0,
    damping: int = 1,
    mean_field: str = "damped",
    dynamics: str = "own",
    tolerance: float = 0.0,
    lr_decay: float = 1.0,
    weight_decay: float = 0.0,
    batches: Batches = lambda t, i, epoch: [None],
    gradient: Callable[[int, Vector, Any], Vector] | None = None,
    terms: tuple[np.ndarray, np.ndarray | None] | None = None,
) -> list[dict[str, Any]]:
    """FA-1, FA-J (`damping`) and FA-0 (`mean_field="fixed_point"`).

    With "fixed_point", no paper says what happens after w has moved: the history ends there.

    Args:
        batches: Of (round, client, epoch): its mini-batches, as indices of samples; None for
            all.
        terms: φ1 [L, P] and, for the fixed point, φ2 [L + 1, P] that the server already has.
    """
    gradient = gradient or problem.gradient
    phi, path = terms if terms is not None else (None, None)
    history = []
    for t, cohort in enumerate(trace):
        base = lr * lr_decay**t
        if mean_field == "damped" and phi is not None:
            eta = np.full(epochs, base)
            for _ in range(damping - 1):
                eta = damped(eta, phi, penalty)
            path = walk(w, phi, eta)
        walked: dict[int, np.ndarray] = {}
        sums: dict[int, np.ndarray] = {}
        rates: dict[int, list[float]] = {}
        for i in cohort:
            v, steps, own, rates[i] = w.copy(), [w.copy()], [], []
            for epoch in range(epochs):
                eta_now = base
                if phi is not None:
                    assert path is not None
                    eta_now = best_rates(v, phi[epoch:], path[epoch:], penalty)[0]
                    eta_now = min(max(eta_now, 0.0), max_rate)
                g = np.zeros_like(w)
                for batch in batches(t, i, epoch):
                    g_batch = gradient(i, v, batch) + weight_decay * v
                    g = g + g_batch
                    if dynamics == "own":
                        v = v - eta_now * g_batch
                if dynamics == "aggregated" and phi is not None:
                    v = v - eta_now * phi[epoch]
                own.append(g)
                steps.append(v.copy())
                rates[i].append(eta_now)
            walked[i], sums[i] = np.stack(steps), np.stack(own)
        moved = True
        if cohort:
            new_phi = np.mean([sums[i] for i in cohort], axis=0)
            if mean_field == "fixed_point":
                new_path = np.mean([walked[i] for i in cohort], axis=0)
                moved = (
                    phi is not None
                    and path is not None
                    and bool(np.linalg.norm(new_phi - phi) < tolerance)
                    and bool(np.linalg.norm(new_path - path) < tolerance)
                )
                path = new_path
            phi = new_phi
            if moved:
                sizes = [problem.sizes[i] for i in cohort]
                w = np.average([walked[i][-1] for i in cohort], axis=0, weights=sizes)
        history.append({"w": w, "gradients": phi, "path": path, "rates": rates, "walked": walked})
        if mean_field == "fixed_point" and cohort and moved:
            break
    return history


# ---- FedACS -------------------------------------------------------------------------------------


def cosine(a: Vector, b: Vector) -> float:
    """<a, b> / (|a| |b|); 0 where one of them is 0 and has no direction; 1 of a and a, exactly."""
    norms = np.sqrt(a @ a) * np.sqrt(b @ b)
    if not norms:
        return 0.0
    return 1.0 if np.array_equal(a, b) else float(a @ b / norms)


def quantile_of(entries: Sequence[float], level: float) -> float:
    """With linear interpolation between neighbours in order."""
    ordered = sorted(entries)
    place = level * (len(ordered) - 1)
    low = int(np.floor(place))
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def collaboration(models: np.ndarray, quantile: float | None) -> tuple[np.ndarray, float]:
    """a_ij [n, n], rows summing to 1, of models [n, P]; and how near an entry is to the threshold.

    Without a quantile there is no threshold.

    Entries equal to the threshold in exact arithmetic (it often is one of them) count as distance
    infinity: they are not greater. A pair's cosine is computed once, so that both halves are equal.
    """
    n = len(models)
    s = np.zeros((n, n))
    for i in range(n):
        for j in range(i):
            s[i, j] = s[j, i] = cosine(models[i], models[j])
        s[i, i] = cosine(models[i], models[i])
    off = [s[i, j] for i in range(n) for j in range(n) if i != j] or [1.0]
    delta = -np.inf
    if quantile is not None:
        delta = quantile_of(s.ravel().tolist(), quantile)
    a = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if j == i:
                a[i, j] = 1.0
            elif s[i, j] > delta:
                a[i, j] = max(s[i, j], 0.0)
    near = [abs(entry - delta) for entry in off if entry != delta]
    return a / a.sum(1, keepdims=True), min(near, default=np.inf)


def fedacs(
    problem: Problem,
    w: Vector,
    trace: Sequence[Sequence[int]],
    *,
    quantile: float | None,
    lr: float,
    steps: int,
    candidates: str = "participants",
    start: np.ndarray | None = None,
    lr_decay: float = 1.0,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """FedACS with full gradients: participants upload w_i, get u_i, train from there.

    With candidates="all" the server knows what a client has uploaded, which is its model before its
    last training; nothing of a client that never took part. `start` [M, P]: None: all at w.
    """
    m = problem.num_clients
    models = np.tile(w, (m, 1)) if start is None else start.copy()
    sent: dict[int, Vector] = {}
    history = []
    for t, cohort in enumerate(trace):
        eta = lr * lr_decay**t
        for i in cohort:
            sent[i] = models[i].copy()
        group = sorted(sent if candidates == "all" and cohort else cohort)
        server = {j: sent[j] for j in group}
        weights: dict[tuple[int, int], float] = {}
        near = np.inf
        if group:
            a, near = collaboration(np.stack([server[j] for j in group]), quantile)
            for i in cohort:
                row = a[group.index(i)]
                weights |= {(i, j): row[k] for k, j in enumerate(group)}
                v = sum(row[k] * server[j] for k, j in enumerate(group))
                for _ in range(steps):
                    v = v - eta * (problem.gradient(i, v) + weight_decay * v)
                models[i] = v
        partners = [sum(weights[i, j] > 0 for j in group if j != i) for i in cohort]
        history.append(
            {
                "w": models.copy(),
                "weights": weights,
                "collaborators": float(np.mean(partners)) if partners else None,
                "near": near,
            }
        )
    return history


def table(algorithm: Any) -> dict[int, dict[tuple[int, int], float]]:
    """`collaboration.csv`, as {round from 0: {(client, partner): weight}}, without zeros."""
    actual: dict[int, dict[tuple[int, int], float]] = {}
    path = algorithm.trainer.run_dir / "collaboration.csv"
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            pair = int(row["client"]), int(row["partner"])
            own = actual.setdefault(int(row["round"]) - 1, {})
            assert pair not in own
            if float(row["weight"]):
                own[pair] = float(row["weight"])
    return actual


def rates_by_round(algorithm: Any) -> dict[int, dict[int, list[float]]]:
    """`rates.csv`, as {round from 0: {client: [rate of each epoch]}}."""
    rates: dict[int, dict[int, list[float]]] = {}
    with (algorithm.trainer.run_dir / "rates.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            own = rates.setdefault(int(row["round"]) - 1, {}).setdefault(int(row["client"]), [])
            assert len(own) == int(row["epoch"])  # in order
            own.append(float(row["rate"]))
    return rates
