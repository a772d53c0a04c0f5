"""Where the baselines end on quadratics, and what their rounds cost; see closed_forms.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pfl.algorithms import IFCA, FedSpa, Floco
from tests.algorithms.closed_forms import (
    Exchange,
    Models,
    Quadratics,
    averaging,
    body,
    class_counts,
    mean_of,
    partly_personal,
    quadratics,
)

START = 0.3  # all values of the first model


def weights_of(q: Quadratics) -> np.ndarray:
    """Which of the P values are weights and not biases."""
    return np.arange(q.optima.shape[1]) < int(np.prod(q.problem.shapes[0]))


def pooled_minimum(q: Quadratics, **_: Any) -> Models:
    """GlobalTrain: argmin sum_i n_i f_i."""
    return mean_of(q.problem.sizes[:, None] * q.curvatures, q), None


def held_to_average(q: Quadratics, *, penalty: float, **settings: Any) -> Models:
    """Ditto: w is FedAvg's; h_i (v_i - A_i) + λ (v_i - w) = 0."""
    w = averaging(q, **settings)[0]
    assert w is not None
    return w, (q.curvatures * q.optima + penalty * w) / (q.curvatures + penalty)


def meta_learned(
    q: Quadratics, *, lr: float, local_steps: int, alpha: float, variant: str = "HF", **_: Any
) -> Models:
    """Per-FedAvg. After adaptation A_i is (1 - α h_i) as far away. So the gradient of
    F_i = h_i/2 (1 - α h_i)^2 (w - A_i)^2 is k_i (w - A_i) with k_i = h_i (1 - α h_i)^2; FO leaves
    the Hessian's factor out, k_i = h_i (1 - α h_i). K steps take the share
    c_i = 1 - (1 - η k_i)^K of the way, and in the limit the moves, with equal weights, cancel."""
    left = 1 - alpha * q.curvatures
    k = q.curvatures * left ** (2 if variant == "HF" else 1)
    w = mean_of(1 - (1 - lr * k) ** local_steps, q)
    return w, q.optima + left * (w - q.optima)


def own_biases(q: Quadratics, **settings: Any) -> Models:
    """FedALA with the biases as the last layers. A weight W_i > 0 takes a bias away from its
    client's optimum, so W_i falls until it is 0, and the bias goes to the optimum A_i; the global
    biases are the mean of these by samples. The weights go where averaging takes them."""
    models = partly_personal(q, **settings)[1]
    assert models is not None
    return np.average(models, axis=0, weights=q.problem.sizes), models


def mixture(q: Quadratics, *, lr: float, local_steps: int, alpha: float, **_: Any) -> Models:
    """APFL. w is the unweighted FedAvg's. In a round w_i,k - A_i = r^k y with r = 1 - η h_i and
    y = w - A_i; with x = v_i - A_i and s = 1 - η α^2 h_i a step is
    x <- s x - η α h_i (1 - α) (w_i,k+1 - A_i). A whole round gives x again:
    x (1 - s^K) = -η α (1 - α) h_i y sum_k s^(K-1-k) r^(k+1)."""
    h, steps = q.curvatures, np.arange(local_steps)
    r, s = 1 - lr * h, 1 - lr * alpha**2 * h
    w = mean_of(1 - r**local_steps, q)
    pulls = sum(s ** (local_steps - 1 - k) * r ** (k + 1) for k in steps)
    x = -lr * alpha * (1 - alpha) * h * (w - q.optima) * pulls / (1 - s**local_steps)
    return w, alpha * (q.optima + x) + (1 - alpha) * w


def with_biases(q: Quadratics, moved: np.ndarray) -> Quadratics:
    """The problem of outputs to which a client adds the numbers -moved [M, 2]."""
    optima = q.optima.copy()
    optima[:, -2:] += moved
    return replace(q, optima=optima)


def calibrated(q: Quadratics, *, calibration: float, **settings: Any) -> Models:
    """FedLC: FedAvg with outputs lowered by τ n_i,c^(-1/4), which the biases make up for."""
    return averaging(with_biases(q, calibration * class_counts(q) ** -0.25), **settings)


def heads_added(q: Quadratics, *, lr: float, local_steps: int, **_: Any) -> Models:
    """FedRoD with one layer, which is the head. w is FedAvg's with outputs raised by log n_i,c,
    whose minima are B_i. In a round w_i,k - B_i = r^k y with r = 1 - η h_i and y = w - B_i, and
    p_i <- r p_i - η h_i (r^k y + B_i - A_i). A whole round gives p_i again:
    p_i (1 - r^K) = -η h_i K r^(K-1) y - (1 - r^K) (B_i - A_i)."""
    balanced = with_biases(q, -np.log(class_counts(q)))
    w = averaging(balanced, lr=lr, local_steps=local_steps)[0]
    assert w is not None
    r = 1 - lr * q.curvatures
    moved = lr * q.curvatures * local_steps * r ** (local_steps - 1) * (w - balanced.optima)
    return w, w - moved / (1 - r**local_steps) - (balanced.optima - q.optima)


def common_minimum(q: Quadratics, **_: Any) -> Models:
    """APFL with α_i that adapt, whose last values depend on all rounds. Where all clients have the
    same minimum, they do not matter: w and the v_i go there."""
    return q.optima[0], q.optima


def personal_minimum(q: Quadratics, **_: Any) -> Models:
    """FedDBE with one layer, whose features are its inputs, which nothing moves; and APPLE where
    all clients have the same minimum."""
    return None, q.optima


def envelopes(
    q: Quadratics,
    *,
    lr: float,
    local_steps: int,
    penalty: float,
    personal_steps: int,
    personal_lr: float,
    **_: Any,
) -> Models:
    """pFedMe. K inner steps take θ from w the share c = 1 - (1 - η_p (h + λ))^K of the way to the
    proximal point, h (A - w) / (h + λ) away: w moves by η k (A - w) with k = λ c h / (h + λ). Local
    steps leave the share (1 - η k)^R of the distance; in the limit the moves cancel. θ_i is that of
    the last local step, which begins at A + (1 - η k)^(R - 1) (w - A)."""
    h = q.curvatures
    solved = (1 - (1 - personal_lr * (h + penalty)) ** personal_steps) * h / (h + penalty)
    left = 1 - lr * penalty * solved
    w = mean_of(1 - left**local_steps, q)
    last = q.optima + left ** (local_steps - 1) * (w - q.optima)
    return w, last + solved * (q.optima - last)


def averaging_of_heads(q: Quadratics, **settings: Any) -> Models:
    """FedGen of heads, with one layer, which is the head: all clients have the mean."""
    shared = averaging(q, **settings)[0]
    assert shared is not None
    return None, np.tile(shared, (len(q.optima), 1))


def local_weights(q: Quadratics, **settings: Any) -> Models:
    """LG-FedAvg with the weights as the body: these go to the clients' optima, the biases where
    averaging takes them."""
    shared = averaging(q, **settings)[0]
    assert shared is not None
    return None, np.where(weights_of(q), q.optima, shared)


def body_then_finetuned(
    q: Quadratics, *, lr: float, local_steps: int, finetune_epochs: int, **_: Any
) -> Models:
    """FedBABU with the biases as the head: the weights go where averaging takes them, the biases
    stay. Then an epoch of full gradients is a step, which leaves 1 - η h_i of the distance."""
    shared = averaging(q, lr=lr, local_steps=local_steps)[0]
    assert shared is not None
    w = np.where(weights_of(q), shared, START)
    return w, q.optima + (1 - lr * q.curvatures) ** finetune_epochs * (w - q.optima)


def head_of_means(q: Quadratics, **_: Any) -> Models:
    """FedGH with one layer, which is the head. Inputs have mean 0, so a client sends 0 and its mean
    target c_i. At 0 the head's output is its bias b: the weights never move, and b goes to the
    minimum of the mean of 1/2 |b - c_i|^2 over the clients."""
    weights = weights_of(q)
    biases = np.where(weights, START, q.optima.mean(0))
    return None, np.tile(biases, (len(q.optima), 1))


def mixed_biases(
    q: Quadratics, *, lr: float, local_steps: int, head_epochs: int, head_lr: float, **_: Any
) -> Models:
    """FedPAC with the biases as the head, on one layer, whose features are its inputs. These have
    mean 0 in each class, so H_i = 0, and |x|^2 = a_i d, so V_i = a_i d / n_i: α_ij is in proportion
    to n_j / a_j, for all i. From the common bias b = sum_j α_j b_j full gradients leave r = (1 -
    η_h)^τ_h of the distance to c_i: b_i = c_i + r (b - c_i), and so b = sum_j α_j c_j. Features do
    not move, and the weights go where averaging takes them."""
    shared = averaging(q, lr=lr, local_steps=local_steps)[0]
    assert shared is not None
    start = mean_of(q.problem.sizes[:, None] / q.curvatures[:, :1], q)
    biases = q.optima + (1 - head_lr) ** head_epochs * (start - q.optima)
    return None, np.where(weights_of(q), shared, biases)


def messages(
    q: Quadratics,
    *,
    lr: float,
    local_steps: int,
    penalty: float,
    alpha: float,
    sigma: float,
    own_weight: float | None = None,
    **_: Any,
) -> Models:
    """FedAMP with σ so large that all ξ_ij = α / σ =: ξ; HeurFedAMP with σ so small that all are
    (1 - ξ_ii) / (n - 1). Local steps take w_i from u_i = (1 - n ξ) w_i + ξ sum_j w_j the share
    m = (1 - (1 - η (h + ρ))^K) h / (h + ρ), with ρ = λ / α, of the way to A_i. With S = sum_j w_j:
    w_i (1 - (1 - m)(1 - n ξ)) = m A_i + (1 - m) ξ S, which summed over i gives S."""
    n, rho = len(q.optima), penalty / alpha
    if n == 1:
        return None, q.optima
    xi = alpha / sigma if own_weight is None else (1 - own_weight) / (n - 1)
    held = q.curvatures + rho
    m = (1 - (1 - lr * held) ** local_steps) * q.curvatures / held
    own = 1 - (1 - m) * (1 - n * xi)
    total = (m * q.optima / own).sum(0) / (1 - ((1 - m) * xi / own).sum(0))
    return None, (m * q.optima + (1 - m) * xi * total) / own


def weighted_by_information(q: Quadratics, *, lr: float, local_steps: int, **_: Any) -> Models:
    """FedAS with the biases as the head. A bias goes to its client's optimum. K steps leave the
    share l_i = (1 - η h_i)^K of the way from A_i to the weights u, where the gradient is
    h_i l_i (u - A_i) and its squares sum to t_i; u is a fixed point of the mean of
    A_i + l_i (u - A_i) with the weights t_i, found by going half of the way."""
    body = weights_of(q)
    h, optima = q.curvatures[:, body], q.optima[:, body]
    left = (1 - lr * h) ** local_steps
    u = optima.mean(0)
    for _turn in range(500):
        trace = ((h * left * (u - optima)) ** 2).sum(1) + np.finfo(float).tiny
        u = (u + np.average(optima + left * (u - optima), axis=0, weights=trace)) / 2
    models = q.optima.copy()
    models[:, body] += left * (u - optima)
    return None, models


def groups(clients: int) -> Quadratics:
    """Up to four clients, those with even ids about START + u, and the others about START - u."""
    rng = np.random.default_rng(8)
    u = 4 * rng.normal(size=(4, 3))
    optima = [START + (-1) ** i * u + 0.1 * rng.normal(size=u.shape) for i in range(4)]
    return quadratics(optima[:clients], [0.8, 1.0, 2.0, 1.5][:clients], [1, 3, 2, 1][:clients])


def averaging_in_groups(q: Quadratics, *, lr: float, local_steps: int, **_: Any) -> Models:
    """IFCA and CFL with two clusters. CFL splits the clients where they pull in opposite
    directions. IFCA's first model begins at START, the second one at START + n, which
    is nearer to the clients of one group, as <n, u> > 0 or < 0 and u is large. So each group has
    one model, which goes where averaging with equal weights takes it."""
    moved = 1 - (1 - lr * q.curvatures) ** local_steps
    models = np.empty_like(q.optima)
    for first in range(min(2, len(models))):
        rows = slice(first, None, 2)
        models[rows] = (moved * q.optima)[rows].sum(0) / moved[rows].sum(0)
    return None, models


def models_of_clusters(x: Exchange) -> tuple[float, float]:
    """IFCA: k models down; a model and its cluster up."""
    assert isinstance(x.algorithm, IFCA)
    return x.algorithm.clusters * x.size, x.size + 1


def models_of_others(x: Exchange) -> tuple[float, float]:
    """FedFomo: other clients' models down; a model, and a number for each of these up."""
    count = -(-x.read // x.size)
    return count * x.size, x.size + count


def core_models(x: Exchange) -> tuple[float, float]:
    """APPLE: the models and the shares of all clients down; a model up."""
    return x.algorithm.num_clients * (x.size + 1), x.size


def dense_and_number(x: Exchange) -> tuple[float, float]:
    """FedNova: a model down; a direction and the sum of its coefficients up."""
    return x.size, x.size + 1


def body_and_number(x: Exchange) -> tuple[float, float]:
    """FedAS: the matrices down; the matrices and t_i up."""
    floats = body(x)[0]
    return floats, floats + 1


def heads_and_centre(x: Exchange) -> tuple[float, float]:
    """Floco: K biases of each layer and the matrices each way; from the round τ K numbers down."""
    assert isinstance(x.algorithm, Floco)
    count = x.algorithm.count
    floats = body(x)[0] + count * biases(x)[0]
    return floats + count * (x.round >= x.algorithm.projection_round), floats


def shared_part(x: Exchange) -> tuple[float, float]:
    """All values but those of the personal part, each way."""
    floats = int((~np.asarray(x.algorithm.personal_part)).sum())
    return floats, floats


def biases(x: Exchange) -> tuple[float, float]:
    """The biases down and up; the matrices stay."""
    floats = sum(shape[0] for shape in x.shapes if len(shape) == 1)
    return floats, floats


def head_and_pair(x: Exchange) -> tuple[float, float]:
    """FedGH in regression: the last layer down, a mean feature and a mean target up."""
    names = [layer.name.rpartition(".")[0] for layer in x.algorithm.space.layers]
    head = [shape for name, shape in zip(names, x.shapes, strict=True) if name == names[-1]]
    outputs, features = next(shape for shape in head if len(shape) == 2)
    return sum(int(np.prod(shape)) for shape in head), features + outputs


def prototypes(x: Exchange) -> tuple[float, float]:
    """FedProto: the K features of the last layer and the class's number down, for all classes after
    the first round; the same and the number of samples up, for each class of the client."""
    outputs, features = next(shape for shape in reversed(x.shapes) if len(shape) == 2)
    own = int(np.count_nonzero(x.sent["sums"].reshape(outputs, 1 + features)[:, 0]))
    down = outputs * (1 + features) if x.round else 0
    return down, own * (2 + features)


def trained_prototypes(x: Exchange) -> tuple[float, float]:
    """FedTGP: K features of each class down after the first round; these and the class's number up
    for each class of the client."""
    outputs, features = next(shape for shape in reversed(x.shapes) if len(shape) == 2)
    own = int(np.count_nonzero(x.sent["means"].reshape(outputs, 1 + features)[:, 0]))
    return outputs * features if x.round else 0, own * (1 + features)


def alone_beside_averaging(q: Quadratics, **arguments: Any) -> Models:
    """FML and FedKD without distillation, with a messenger as the clients' network: each client at
    its optimum, and beside it the messenger where averaging takes it. FedKD's map of features stays
    the identity."""
    common = averaging(q, **arguments)[0]
    assert common is not None
    beside = [common]
    if "first_energy" in arguments:
        beside.append(np.eye(q.problem.shapes[0][1]).ravel())
    return None, np.hstack([q.optima, np.tile(np.concatenate(beside), (len(q.optima), 1))])


def messenger(x: Exchange) -> tuple[float, float]:
    """FML with a messenger as the clients' network: half of the P values down and up."""
    return x.size // 2, x.size // 2


def messenger_beside(x: Exchange) -> tuple[float, float]:
    """FedMRL: the messenger down and up."""
    layers = [layer for layer in x.algorithm.space.layers if layer.name.startswith("messenger.")]
    size = sum(layer.size for layer in layers)
    return size, size


def messenger_of_low_rank(x: Exchange) -> tuple[float, float]:
    """FedKD: the messenger down; up the factors of the change of each of its matrices."""
    layers = [layer for layer in x.algorithm.space.layers if layer.name.startswith("messenger.")]
    up = 0
    for layer in layers:
        values = (x.sent["w"] - x.received)[layer.span]
        if len(layer.shape) == 1:
            up += layer.size
            continue
        rank = int(np.linalg.matrix_rank(values.reshape(layer.shape), tol=1e-9))
        up += min(rank * sum(layer.shape), layer.size)
    return sum(layer.size for layer in layers), up


def generator_and_label_shares(x: Exchange) -> tuple[float, float]:
    """FedGen: what is shared each way, and the shares of K classes up; after a first round these
    and the values of a generator with 2 and K inputs, 3 hidden units and F features down."""
    outputs, features = next(shape for shape in reversed(x.shapes) if len(shape) == 2)
    generator = 3 * (2 + outputs) + 3 + features * 3 + features
    personal: Any = x.algorithm.personal_part
    shared = x.size - int(personal.sum())
    return shared + (outputs + generator if x.round else 0), shared + outputs


def scores_of_public_samples(x: Exchange) -> tuple[float, float]:
    """FedMD with 5 public samples: their scores up; these and a number down after a first round."""
    outputs = x.shapes[-1][0]
    return 1 + 5 * outputs if x.round else 0, 5 * outputs


def class_probabilities(x: Exchange) -> tuple[float, float]:
    """FedDistill: the probabilities of a class and its number, down for all classes once others
    have sent theirs, up for each class of the client."""
    outputs = next(shape for shape in reversed(x.shapes) if len(shape) == 2)[0]
    own = int(np.count_nonzero(x.sent["means"].reshape(outputs, 1 + outputs)[:, 0]))
    down = outputs * (1 + outputs) if x.round else 0
    return down, own * (1 + outputs)


def dense_and_mean(x: Exchange) -> tuple[float, float]:
    """FedDBE: P each way; the K features' mean up in the first round, and down in the others."""
    features = next(shape for shape in reversed(x.shapes) if len(shape) == 2)[1]
    return x.size + (features if x.round else 0), x.size + (0 if x.round else features)


def body_head_and_statistics(x: Exchange) -> tuple[float, float]:
    """FedPAC: a body and a head are all values; V_i and K values of H_i for each of the last
    layer's outputs, besides what FedProto sends."""
    down, up = prototypes(x)
    outputs, features = next(shape for shape in reversed(x.shapes) if len(shape) == 2)
    return x.size + down, x.size + 1 + outputs * features + up


def plain_averaging(q: Quadratics, *, lr: float, local_steps: int, **_: Any) -> Models:
    """HeteroFL and FedRolex with one network: FedAvg with equal weights, and all clients have w."""
    w = mean_of(1 - (1 - lr * q.curvatures) ** local_steps, q)
    return w, np.tile(w, (len(q.optima), 1))


def everything_in_the_mask(q: Quadratics, *, lr: float, local_steps: int, **_: Any) -> Models:
    """FedSpa with the density 1: FedAvg with equal weights, whose moves cancel in the limit."""
    w = mean_of(1 - (1 - lr * q.curvatures) ** local_steps, q)
    return None, np.tile(w, (len(q.optima), 1))


def half_and_the_mask(x: Exchange) -> tuple[float, float]:
    """FedSpa: a share of all values each way; a bit for each weight up (a float has 8 bytes)."""
    assert isinstance(x.algorithm, FedSpa)
    weights = sum(int(np.prod(shape)) for shape in x.shapes if len(shape) > 1)
    values = int(x.algorithm.density * x.size)
    return values, values + -(-weights // 8) / 8
