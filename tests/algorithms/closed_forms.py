"""Where methods end on quadratics, and what their rounds cost: closed forms, for methods.py.

Limits are those of f_i(w) = 1/2 sum_p h_ip (w_p - A_ip)^2 with full gradients: `Quadratics`. Costs
are in floats of a participant in a round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from models import HalfSquaredError
from pfl.algorithms import FederatedAlgorithm, FedPD
from tests.algorithms import reference
from tests.problems import Problem, matrix_problem, owned

# ---- problems -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quadratics:
    """Clients with f_i(w) = 1/2 sum_p h_ip (w_p - A_ip)^2, a matrix and biases (`Problem`).

    Attributes:
        optima: A [M, P].
        curvatures: h [M, P]: a_i for all weights, and 1 for biases.
        loss: The loss of a sample.
    """

    problem: Problem
    optima: np.ndarray
    curvatures: np.ndarray
    loss: nn.Module = field(default_factory=HalfSquaredError)

    def matrix(self, w: np.ndarray, threshold: float) -> np.ndarray:
        """The nuclear norm's prox of w [P]; biases stay."""
        return reference.layerwise_svt(w, threshold, self.problem.shapes)


def quadratics(
    optima: Sequence[np.ndarray],
    curvatures: Sequence[float],
    copies: Sequence[int],
    biases: Sequence[np.ndarray] | None = None,
) -> Quadratics:
    """As `matrix_problem`."""
    problem = matrix_problem(optima, curvatures, copies, biases)
    flat, h = [np.ravel(a) for a in optima], np.repeat([curvatures], optima[0].size, 0).T
    if biases is not None:
        flat = [np.append(a, c) for a, c in zip(flat, biases, strict=True)]
        h = np.append(h, np.ones((len(h), len(biases[0]))), axis=1)
    return Quadratics(problem, np.array(flat), h)


def different(clients: int) -> Quadratics:
    """Up to four clients that differ in everything, number of samples and curvature included."""
    rng = np.random.default_rng(3)
    optima = list(rng.normal(size=(6, 5)) + rng.normal(size=(4, 6, 5)))
    biases = list(rng.normal(size=(4, 6)))
    a, copies = [0.8, 1.0, 2.0, 1.5], [1, 3, 2, 1]
    return quadratics(optima[:clients], a[:clients], copies[:clients], biases[:clients])


def alike(clients: int) -> Quadratics:
    """Up to four clients with the same objective and different numbers of samples."""
    rng = np.random.default_rng(4)
    optimum, bias = rng.normal(size=(4, 3)), rng.normal(size=4)
    copies = [1, 3, 2, 1][:clients]
    return quadratics([optimum] * clients, [1.5] * clients, copies, [bias] * clients)


class DistanceToClass(HalfSquaredError):
    """1/2 |output - e_y|^2 of the class y of each sample."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(outputs, one_hot(targets, outputs.shape[1]).to(outputs))


def with_classes(clients: int, *, opposite: bool = False) -> Quadratics:
    """Up to four clients whose samples have one of two classes; `DistanceToClass` is the loss.

    The inputs x are those of `matrix_problem`: the mean of x x' is a_i I and that of x is 0, so
    that with targets e_y f_i has the minimum A_i = mean(e_y x') / a_i and c_i = mean(e_y).

    Args:
        opposite: Whether x and -x have the same class. The mean of x in each class is then 0, and
            so is A_i.
    """
    rng = np.random.default_rng(7)
    d, a, copies = 17, [0.8, 1.0, 2.0, 1.5][:clients], [1, 3, 2, 1][:clients]
    inputs = matrix_problem([np.zeros((2, d))] * clients, a, copies).features
    one_hots, optima = [], []
    for x, curvature, times in zip(inputs, a, copies, strict=True):
        share = rng.uniform(0.2, 0.8)
        y = np.tile(rng.random(d) < share, 2) if opposite else rng.random(2 * d) < share
        targets = np.eye(2)[np.tile(y, times).astype(int)]
        one_hots.append(targets)
        optima.append(np.append(targets.T @ x / (curvature * len(x)), targets.mean(0)))
    problem = Problem(inputs, one_hots, lambda: nn.Linear(d, 2), bias=True)
    owners = np.repeat(np.arange(clients), problem.sizes)
    labels = torch.from_numpy(np.concatenate(one_hots).argmax(1))
    problem.datamodule = owned(owners, torch.from_numpy(np.concatenate(inputs)), labels)
    h = np.repeat([a], 2 * d, 0).T
    h = np.append(h, np.ones((clients, 2)), axis=1)
    return Quadratics(problem, np.array(optima), h, DistanceToClass())


def class_counts(q: Quadratics) -> np.ndarray:
    """The number of samples of each class, [M, 2], of a problem `with_classes`."""
    return np.array([targets.sum(0) for targets in q.problem.targets])


PAIR = float(np.sqrt(3.0)), 1.0  # (x, y) and (x, -y) are 60 degrees apart


def pairs(clients: int) -> Quadratics:
    """Up to two pairs of clients, with optima (x, ±y) in a plane of the pair's own."""
    x, y = PAIR
    optima = [[[x, y], [0, 0]], [[x, -y], [0, 0]], [[0, 0], [y, x]], [[0, 0], [-y, x]]]
    a, copies = [1.0, 1.0, 1.5, 1.5], [1, 3, 2, 1]
    return quadratics(list(np.array(optima))[:clients], a[:clients], copies[:clients])


# ---- limits -------------------------------------------------------------------------------------

Models = tuple[np.ndarray | None, np.ndarray | None]
"""The global model [P] and the personalized ones [M, P] that a method ends at; None: has none."""


def mean_of(weights: np.ndarray, q: Quadratics) -> np.ndarray:
    """sum_i weights_ip A_ip / sum_i weights_ip."""
    return (weights * q.optima).sum(0) / weights.sum(0)


def averaging(
    q: Quadratics, *, lr: float, local_steps: int = 1, proximal_weight: float = 0.0, **_: Any
) -> Models:
    """FedAvg, and FedProx with μ. K steps on f_i + μ/2 |v - w|^2 take a client the share
    c_i = 1 - (1 - η (h_i + μ))^K of the way from w to w + h_i (A_i - w) / (h_i + μ); in the limit
    the moves, weighted by samples, cancel."""
    held = q.curvatures + proximal_weight
    moved = (1 - (1 - lr * held) ** local_steps) * q.curvatures / held
    return mean_of(q.problem.sizes[:, None] * moved, q), None


def alone(q: Quadratics, **_: Any) -> Models:
    """LocalTrain: A_i."""
    return None, q.optima


def partly_personal(q: Quadratics, *, lr: float, local_steps: int, **_: Any) -> Models:
    """FedPer and FedRep with the biases as the head: objectives are sums over the parameters, so a
    bias goes to its client's optimum, and a weight where averaging takes it, whichever of them is
    trained first."""
    shared = averaging(q, lr=lr, local_steps=local_steps)[0]
    assert shared is not None
    models, weights = q.optima.copy(), int(np.prod(q.problem.shapes[0]))
    models[:, :weights] = shared[:weights]
    return None, models


def low_rank_and_sparse(
    q: Quadratics,
    *,
    low_rank_penalty: float,
    sparse_penalty: float,
    global_component: str = "low_rank",
    personal_component: str = "sparse",
    **_: Any,
) -> Models:
    """FedSLR. With h = mean h_i and B = sum h_i A_i / sum h_i, mean f_i = h/2 |w - B|^2 + const:
    w is the prox of B with λ / h. Then p_i is that of A_i - w with μ / h_i."""

    def prox(component: str, x: np.ndarray, penalty: float, h: np.ndarray) -> np.ndarray:
        if component == "low_rank":
            return q.matrix(x, penalty / h[0])
        return np.sign(x) * np.maximum(np.abs(x) - penalty / h, 0.0)

    centre = mean_of(q.curvatures, q)
    w = prox(global_component, centre, low_rank_penalty, q.curvatures.mean(0))
    p = [
        prox(personal_component, a - w, sparse_penalty, h)
        for a, h in zip(q.optima, q.curvatures, strict=True)
    ]
    return w, w + np.array(p)


def mean_of_low_rank(q: Quadratics, *, low_rank_penalty: float, **_: Any) -> Models:
    """LPGD with local problems solved: the mean of SVT_{λ / a_i}(A_i)."""
    solved = [
        q.matrix(a, low_rank_penalty / h[0]) for a, h in zip(q.optima, q.curvatures, strict=True)
    ]
    return np.mean(solved, axis=0), None


def low_rank_of_mean(
    q: Quadratics, *, lr: float, local_steps: int, low_rank_penalty: float, **_: Any
) -> Models:
    """GPGD: w <- SVT_{ηλ}((1 - c) w + c B) with c_i = 1 - (1 - η h_i)^K, c = mean c_i and
    B = sum c_i A_i / sum c_i is a proximal step on c/2 |w - B|^2 + ηλ |w|_*: SVT_{ηλ/c}(B)."""
    moved = 1 - (1 - lr * q.curvatures) ** local_steps
    return q.matrix(mean_of(moved, q), lr * low_rank_penalty / moved.mean(0)[0]), None


def held_together(q: Quadratics, *, penalty: float, **_: Any) -> Models:
    """FedCLUP with uniform weights: h_i (w_i - A_i) + λ (w_i - w) = 0 and w = mean w_i, that is
    w = sum k_i A_i / sum k_i with k_i = h_i λ / (h_i + λ), the curvatures of the envelopes."""
    w = mean_of(q.curvatures * penalty / (q.curvatures + penalty), q)
    return w, (q.curvatures * q.optima + penalty * w) / (q.curvatures + penalty)


def minimum(q: Quadratics, **_: Any) -> Models:
    """FedPD; FedAgg with the aggregated gradient, which stops where that is 0; SCAFFOLD (derived in
    test_scaffold.py): argmin mean f_i."""
    return mean_of(q.curvatures, q), None


def collaboration(q: Quadratics, *, lr: float, local_steps: int, **_: Any) -> Models:
    """FedACS on `pairs`, in which the median cosine is half of that of a pair, so that partners are
    those of the pair. Let A = (x, ±y) be the optima and w = (u, ±v) the models of a pair. Its
    cosine is s = (u^2 - v^2) / (u^2 + v^2), so the mixture (w + s w') / (1 + s) is (u, ±v^3/u^2).
    Local training leaves the share r = (1 - η h)^K of the distance to A: u = x, and
    v = (1 - r) y + r v^3 / x^2. One client alone reaches its own optimum."""
    if len(q.optima) == 1:
        return None, q.optima
    (x, y), models = PAIR, q.optima.copy()
    for model, h in zip(models, q.curvatures[:, 0], strict=True):
        left = (1 - lr * h) ** local_steps
        roots = np.roots([left / x**2, 0.0, -1.0, (1 - left) * y])
        model[np.abs(model) == y] *= roots[(roots > 0) & (roots < y)].item() / y
    return None, models


# ---- costs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """What passes between a client and the server in one round.

    Attributes:
        algorithm: Which one.
        round, client: From 0.
        received: What the client reads as w [P]; empty if the server sends no model.
        sent: What the server reads, by name.
        state: What the client remembers afterwards, by name.
        read: How many numbers that are not 0 the client reads.
    """

    algorithm: FederatedAlgorithm
    round: int
    client: int
    received: np.ndarray
    sent: Mapping[str, np.ndarray]
    state: Mapping[str, np.ndarray]
    read: int

    @property
    def size(self) -> int:
        """P."""
        return self.algorithm.space.size

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the trainable parameters."""
        return [layer.shape for layer in self.algorithm.space.layers]


Cost = Callable[[Exchange], tuple[float, float]]
"""Floats down and up of one participant; 8 bytes each, so that a mask's bit is 1/64 of one."""


def dense(x: Exchange) -> tuple[float, float]:
    """P and P."""
    return x.size, x.size


def dense_and_control(x: Exchange) -> tuple[float, float]:
    """SCAFFOLD: a model and a control variate each way."""
    return 2 * x.size, 2 * x.size


def body(x: Exchange) -> tuple[float, float]:
    """The matrices down and up; the biases are personal and stay."""
    floats = sum(int(np.prod(shape)) for shape in x.shapes if len(shape) > 1)
    return floats, floats


def nothing(x: Exchange) -> tuple[float, float]:
    """Not even the initial model is sent, which everyone has."""
    return 0, 0


def factors_down(x: Exchange) -> tuple[float, float]:
    """Low-rank factors down (the initial model as if it had full rank), P up."""
    return (reference.factor_floats(x.received, x.shapes) if x.round else x.size), x.size


def factors_up(x: Exchange) -> tuple[float, float]:
    """P down, low-rank factors up."""
    return x.size, reference.factor_floats(x.sent["w"], x.shapes)


def gradients(x: Exchange) -> tuple[float, float]:
    """FedAgg: the model and, but for the first round, a gradient an epoch; a gradient an epoch."""
    epochs = x.algorithm.local_epochs
    return x.size * (1 + epochs if x.round else 1), x.size * epochs


def dense_or_skipped(x: Exchange) -> tuple[float, float]:
    """FedPD: P and P, or nothing in a round without communication."""
    assert isinstance(x.algorithm, FedPD)
    return dense(x) if x.algorithm.communicates(x.round) else (0, 0)


def sparse_down(x: Exchange) -> tuple[float, float]:
    """Values that are not 0, with indices of 4 bytes or a mask of a bit each, or P; P up."""
    count = int(np.count_nonzero(x.received))
    return min(count + min(4 * count, -(-x.size // 8)) / 8, float(x.size)), x.size
