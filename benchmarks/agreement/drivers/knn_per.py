"""omarfoq/knn-per, the code of kNN-Per's authors: its client, learner and store.

Replaced are the network (its features are found as MobileNet's are there), the samples, and faiss,
whose index of squared distances is float32.
"""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    CLASSES,
    EVERYONE,
    HIDDEN,
    NEIGHBOURS,
    ROUNDS,
    SHARE,
    Iterates,
    Problem,
    first_network,
    import_in_float64,
    main,
    starts,
    tensors,
)


class Index:
    """The k nearest vectors; number -1 at an infinite distance where there are fewer, as faiss."""

    def __init__(self, dimension: int) -> None:
        self.vectors = np.empty((0, dimension))

    def add(self, vectors: np.ndarray) -> None:
        self.vectors = np.concatenate([self.vectors, vectors])

    def search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        distances = ((vectors[:, None] - self.vectors) ** 2).sum(2)
        nearest = distances.argsort(1)[:, :k]
        missing = ((0, 0), (0, k - nearest.shape[1]))
        found = np.take_along_axis(distances, nearest, 1)
        return (
            np.pad(found, missing, constant_values=np.inf),
            np.pad(nearest, missing, constant_values=-1),
        )


class Samples:
    """One batch of all samples of a client."""

    def __init__(self, problem: Problem, client: int) -> None:
        self.dataset = problem.inputs[client]
        self.batch = tensors(self.dataset, problem.targets[client])

    def __iter__(self) -> Any:
        yield (*self.batch, np.arange(len(self.dataset)))


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The outputs for the samples of the next client, of several models."""
    torch.set_default_dtype(torch.float64)
    sys.modules["faiss"] = faiss = ModuleType("faiss")
    vars(faiss)["IndexFlatL2"] = Index
    import_in_float64(checkout)
    client_there: Any = importlib.import_module("client")
    learner_there: Any = importlib.import_module("learners.learner")

    def outputs(values: np.ndarray, i: int, logits: bool) -> np.ndarray:
        first, tanh, last = first_network(values)
        network = nn.Sequential(OrderedDict(features=nn.Sequential(first, tanh), last=last))
        learner = learner_there.Learner(
            network, nn.CrossEntropyLoss(), None, "cpu", None, model_name="mobilenet"
        )
        client = client_there.KNNPerClient(
            learner,
            Samples(problem, i),
            None,
            Samples(problem, (i + 1) % len(EVERYONE)),
            None,
            None,
            NEIGHBOURS,
            logits,
            HIDDEN,
            CLASSES,
            -1,
            "random",
            None,
        )
        client.compute_features_and_model_outputs()
        client.build_datastore()
        client.gather_knn_outputs()
        mixed: np.ndarray = (
            SHARE * client.test_knn_outputs + (1 - SHARE) * client.test_model_outputs
        )
        right = (mixed.argmax(1) == client.test_labels).mean()
        assert client.evaluate(SHARE) == right
        return mixed

    def run(logits: bool) -> Iterates:
        models = starts(problem.start, ROUNDS)
        rows = [np.concatenate([outputs(w, i, logits) for i in EVERYONE]) for w in models]
        return {"h": np.stack(rows)}

    return {"kNN-Per": run(False), "logits": run(True)}


if __name__ == "__main__":
    main(theirs)
