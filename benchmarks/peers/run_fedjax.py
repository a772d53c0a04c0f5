"""FedJAX: fedjax.algorithms.fed_avg with its default backend, networks in plain JAX.

    env-fedjax/bin/python benchmarks/peers/run_fedjax.py TASK.npz [cpu | cuda]

FedJAX keeps samples in the host's memory, and JAX moves every batch to the device. Batches go on
over the end of an epoch, and the last one is filled with more samples.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.peers.task import Task, report

if not hasattr(jax, "tree_map"):  # JAX has removed it since FedJAX's last version
    jax.tree_map = jax.tree.map

Array = Any
Weights = Iterator[Array]  # a network takes what it needs, in the order that PyTorch has


def linear(x: Array, w: Weights) -> Array:
    return x @ next(w) + next(w)


def conv(x: Array, w: Weights, padding: int | None, stride: int = 1) -> Array:
    """A convolution; without `padding` that which keeps the size of the image."""
    kernel = next(w)
    if padding is None:
        padding = kernel.shape[0] // 2
    pads, layout = [(padding, padding)] * 2, ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=layout)


def pool(x: Array) -> Array:
    size = (1, 2, 2, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, size, size, "VALID")


def flat(x: Array) -> Array:
    return x.reshape(len(x), -1)


def pfllib_cnn(x: Array, w: Weights) -> Array:
    for _ in range(2):
        x = pool(jax.nn.relu(conv(x, w, padding=0) + next(w)))
    return linear(jax.nn.relu(linear(flat(x), w)), w)


def logistic(x: Array, w: Weights) -> Array:
    return linear(flat(x), w)


def mlp(x: Array, w: Weights) -> Array:
    return linear(jax.nn.relu(linear(flat(x), w)), w)


def lenet(x: Array, w: Weights) -> Array:
    for _ in range(2):
        x = pool(jax.nn.relu(conv(x, w, padding=0) + next(w)))
    x = flat(x)
    for _ in range(2):
        x = jax.nn.relu(linear(x, w))
    return linear(x, w)


def cnn(x: Array, w: Weights) -> Array:
    for _ in range(2):
        x = pool(jax.nn.relu(conv(x, w, padding=None) + next(w)))
    return linear(jax.nn.relu(linear(flat(x), w)), w)


def norm(x: Array, w: Weights) -> Array:
    """GroupNorm with two groups."""
    groups = x.reshape(*x.shape[:3], 2, -1)
    centered = groups - groups.mean((1, 2, 4), keepdims=True)
    variance = jnp.square(centered).mean((1, 2, 4), keepdims=True)
    return (centered * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape) * next(w) + next(w)


def resnet(x: Array, w: Weights) -> Array:
    x = jax.nn.relu(norm(conv(x, w, padding=1), w))
    for width in (64, 128, 256, 512):
        for block in range(2):
            stride = 2 if block == 0 and width > 64 else 1
            y = jax.nn.relu(norm(conv(x, w, padding=1, stride=stride), w))
            y = norm(conv(y, w, padding=1), w)
            if x.shape != y.shape:
                x = norm(conv(x, w, padding=0, stride=stride), w)
            x = jax.nn.relu(y + x)
    return linear(x.mean((1, 2)), w)


NETWORKS: dict[str, Callable[[Array, Weights], Array]] = {
    "LogisticRegression": logistic,
    "MLP": mlp,
    "LeNet5": lenet,
    "CNN": cnn,
    "FedAvgCNN": pfllib_cnn,
    "ResNet18": resnet,
}


def from_torch(weights: list[np.ndarray]) -> list[Array]:
    """Kernels [out, in, h, w] as [h, w, in, out], matrices transposed.

    The first matrix after convolutions takes channels last instead of first.
    """
    converted, channels = [], 1
    for w in weights:
        if w.ndim == 4:
            channels = len(w)
            w = w.transpose(2, 3, 1, 0)
        elif w.ndim == 2:
            w = w.reshape(len(w), channels, -1).transpose(2, 1, 0).reshape(-1, len(w))
            channels = 1
        converted.append(jnp.asarray(w))
    return converted


def main() -> None:
    task = Task.load(sys.argv[1])
    jax.config.update("jax_platforms", sys.argv[2] if sys.argv[2:] else "cpu")
    network = NETWORKS[task.network]
    inputs = np.ascontiguousarray(task.inputs.transpose(0, 2, 3, 1))

    def loss(params: list[Array], batch: dict[str, Array], rng: Array = None) -> Array:
        scores = jax.nn.log_softmax(network(batch["x"], iter(params)))
        return -jnp.take_along_axis(scores, batch["y"][:, None], 1).mean()

    data = fedjax.InMemoryFederatedData(
        {i: {"x": inputs[own], "y": task.targets[own]} for i, own in enumerate(task.owned)}
    )
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        client_optimizer=fedjax.optimizers.sgd(task.rate),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(
            batch_size=task.batch, num_epochs=task.epochs, seed=0
        ),
    )
    state = algorithm.init(from_torch(task.weights))
    stamps = [time.perf_counter()]
    for round_index, cohort in enumerate(task.cohorts.tolist()):
        keys = jax.random.split(jax.random.PRNGKey(round_index), len(cohort))
        drawn = zip(data.get_clients(cohort), keys, strict=True)
        state, _ = algorithm.apply(state, [(client, own, key) for (client, own), key in drawn])
        jax.block_until_ready(state.params)
        stamps.append(time.perf_counter())
    memory = jax.local_devices()[0].memory_stats() or {}
    peak_bytes = memory.get("peak_bytes_in_use", 0)

    sevenths = range(0, len(inputs), 7 * 200)
    batches = [
        {"x": inputs[i : i + 1400 : 7], "y": task.targets[i : i + 1400 : 7]} for i in sevenths
    ]
    scores = [np.asarray(network(jnp.asarray(b["x"]), iter(state.params))) for b in batches]
    right = sum((s.argmax(1) == b["y"]).sum() for s, b in zip(scores, batches, strict=True))
    total = sum(float(loss(state.params, b)) * len(b["y"]) for b in batches)
    count = len(task.targets[::7])
    pairs = list(zip(state.params, from_torch(task.weights), strict=True))
    moved = sum(float(jnp.square(p - w).sum()) for p, w in pairs) ** 0.5
    parameters = sum(p.size for p, _ in pairs)
    report(
        stamps,
        parameters,
        float(right / count),
        total / count,
        moved,
        packages=["fedjax", "jax"],
        peak_bytes=peak_bytes,
    )


if __name__ == "__main__":
    main()
