"""FedJAX (github.com/google/fedjax): its algorithms, with the network in plain JAX, in float64."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    CLASSES,
    COHORTS,
    EPOCHS,
    EVERYONE,
    FEATURES,
    HIDDEN,
    RATE,
    SIZES,
    Iterates,
    Problem,
    main,
)

SHAPES = ((HIDDEN, FEATURES), (HIDDEN,), (CLASSES, HIDDEN), (CLASSES,))


class Client:
    """A client's samples, in our order."""

    def __init__(self, problem: Problem, client: int, now: SimpleNamespace) -> None:
        self.problem, self.client, self.now = problem, client, now

    def __len__(self) -> int:
        return SIZES[self.client]

    def shuffle_repeat_batch(self, hparams: object) -> list[dict[str, np.ndarray]]:
        return [
            {"x": x, "y": y}
            for epoch in range(EPOCHS)
            for x, y in self.problem.batches("train", self.now.round, self.client, epoch)
        ]


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of all methods."""
    sys.path.insert(0, str(checkout))
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    from fedjax import optimizers
    from fedjax.algorithms import apfl, fed_avg, fed_prox

    def losses(params: list[Any], batch: dict[str, Any], rng: Any = None) -> Any:
        w, b, head, bias = params
        scores = jnp.tanh(batch["x"] @ w.T + b) @ head.T + bias
        chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), batch["y"][:, None], 1)
        return -chosen[:, 0]

    def loss(params: list[Any], batch: dict[str, Any], rng: Any = None) -> Any:
        return losses(params, batch).mean()

    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES])[:-1]
    start = [
        jnp.asarray(part.reshape(shape))
        for part, shape in zip(np.split(problem.start, ends), SHAPES, strict=True)
    ]

    def vector(params: Any) -> np.ndarray:
        return np.concatenate([np.asarray(part).ravel() for part in params])

    now = SimpleNamespace(round=0)
    own, server = optimizers.sgd(RATE), optimizers.sgd(1.0)

    def run(algorithm: Any) -> Iterates:
        state = algorithm.init(start)
        rows: list[dict[str, np.ndarray]] = []
        for now.round, cohort in enumerate(COHORTS):
            keys = jax.random.split(jax.random.PRNGKey(0), len(cohort))
            clients = [
                (i, Client(problem, i, now), key) for i, key in zip(cohort, keys, strict=True)
            ]
            state, _ = algorithm.apply(state, clients)
            row = {"w": vector(state.params)}
            if hasattr(state, "client_states"):
                known = state.client_states
                v = [vector(known[i].params) if i in known else problem.start for i in EVERYONE]
                row["client v"] = np.stack(v)
            rows.append(row)
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    gradient = jax.grad(loss)
    return {
        "FedAvg": run(fed_avg.federated_averaging(gradient, own, server, None)),
        "FedProx": run(fed_prox.fed_prox(losses, own, server, None, 0.3)),
        "APFL": run(
            apfl.adaptive_personalized_federated_learning(gradient, own, server, None, 0.6)
        ),
    }


if __name__ == "__main__":
    main(theirs)
