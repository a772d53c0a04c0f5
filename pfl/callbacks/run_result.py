"""The result of a run: scores per client, the best round, comparison with the local baseline."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pfl import files, machine
from pfl.clients.schedule import LocalSchedule
from pfl.communication import Ledger
from pfl.datamodules import FederatedDataModule
from pfl.machine import free_cores
from pfl.method.algorithm import FederatedAlgorithm
from pfl.report.partition import client_columns
from pfl.rounds.loop import FederatedLoop
from pfl.scores.distribution import distribution
from pfl.scores.evaluation import client_mean, scores_by_name
from pfl.scores.names import (
    HIGHER_IS_BETTER,
    Directions,
    ScoreName,
    candidates,
    direction,
    parts_of,
    signed_score,
)
from pfl.version import __version__

PACKAGES = ("torch", "lightning", "torchmetrics", "numpy")
_ScoresByName = Mapping[ScoreName, np.ndarray]


@dataclass(frozen=True)
class ClientTable:
    """The table of `clients.csv`, one row for each client, built block by block.

    Attributes:
        data: The data module of the clients.
        scores: _ScoresByName of the last evaluation and of the local baseline, [M] by name.
        ledger: The bytes that the clients sent and received.
        unseen: The ids of the clients that never train.
        epsilons: The ε of each client's samples, [M]; None without `loop.sample_privacy`.
    """

    data: FederatedDataModule
    scores: dict[ScoreName, np.ndarray]
    ledger: Ledger
    unseen: np.ndarray
    epsilons: np.ndarray | None = None

    @classmethod
    def of(
        cls, algorithm: FederatedAlgorithm, loop: FederatedLoop, local: _ScoresByName | None = None
    ) -> ClientTable:
        """Returns the table of a run's present state; every process must call this method."""
        evaluation = getattr(algorithm, "evaluation", None)
        scores = {**scores_by_name(evaluation.scores if evaluation else {}), **(local or {})}
        if hasattr(algorithm, "store"):
            epsilons = algorithm.sample_epsilons()
        else:
            epsilons = None
        ledger = algorithm.client_bytes()
        unseen = loop.unseen_clients
        return cls(loop.datamodule, scores, ledger, unseen, epsilons)

    def columns(self, clients: slice = slice(None)) -> dict[str, np.ndarray]:
        """Returns id, name, sample and label counts, scores and bytes of a range of clients."""
        columns = client_columns(self.data, clients)
        ids = columns["client"]
        if len(self.unseen):
            columns["unseen"] = np.isin(ids, self.unseen).astype(int)
        columns |= {str(name): values[clients] for name, values in self.scores.items()}
        if self.epsilons is not None:
            columns["sample_epsilon"] = self.epsilons[clients]
        received, sent = self.ledger.of(ids)
        return columns | {"uplink_bytes": sent, "downlink_bytes": received}

    def write(self, path: Path) -> None:
        """Writes all rows, block by block, while threads count the labels of the next blocks."""
        rows = range(0, self.data.num_clients, files.CSV_ROWS)
        slices = [slice(begin, begin + files.CSV_ROWS) for begin in rows]
        if len(slices) == 1:
            files.write_csv(path, [self.columns()])
            return
        files.write_csv(path, self._blocks(slices))

    def _blocks(self, slices: Sequence[slice]) -> Iterator[dict[str, np.ndarray]]:
        """Yields the columns of ranges of clients, of which a few are computed ahead."""
        cores = free_cores()
        waiting: deque[Future[dict[str, np.ndarray]]] = deque()
        with ThreadPoolExecutor(cores) as pool:
            for clients in slices:
                waiting.append(pool.submit(self.columns, clients))
                if len(waiting) > 2 * cores:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()


def against_local(
    scores: _ScoresByName, metrics: Directions, select_by: str | None = None
) -> dict[str, Any]:
    """Compares the clients' test scores with the local baseline, if there is one.

    Returns the baseline's mean, standard deviation and worst tenth as `test/local/...`, and the
    shares of clients whose federated model is better than, equal to or worse than the baseline as
    `gained`, `equal` and `lost` (see `gains_over_local`).
    """
    result: dict[str, Any] = {}
    for name, values in scores.items():
        known = values[~np.isnan(values)]
        accurate = "test/local/accuracy" in result and name.number == "loss"  # is enough
        if name.model == "local" and len(known) and not accurate:
            result |= client_mean(name, known, metrics)
    if (gain := gains_over_local(scores, metrics, select_by)) is not None:
        shares = {"gained": gain > 0, "equal": gain == 0, "lost": gain < 0}
        have = ~np.isnan(gain)
        result |= {name: float(mask[have].mean()) for name, mask in shares.items()}
    return result


def gains_over_local(
    scores: _ScoresByName, metrics: Directions | None = None, select_by: str | None = None
) -> np.ndarray | None:
    """Returns how much better each client's federated model is than the local baseline, [M].

    The federated model is the one that counts (`pfl.scores.names.candidates`, by `select_by`). NaN
    for clients without test samples; None without a baseline. The `scores` are of the same round.
    """
    model = parts_of(select_by)[0]
    for number in HIGHER_IS_BETTER:
        if model:
            wanted = f"{model}/{number}"
        else:
            wanted = number
        for name in candidates(map(str, scores), "test", wanted)[:1]:
            local = scores.get(name._replace(model="local"))
            if local is not None and not np.isnan(local).all():
                return signed_score(name, 1, metrics) * (scores[name] - local)
    return None


def distributions(
    scores: _ScoresByName, metrics: Directions, select_by: str | None = None
) -> dict[str, dict[str, float]]:
    """Returns the `distribution` over clients of each test score, and of their "gain"."""
    result = {
        str(name): distribution(values, direction(name, metrics))
        for name, values in scores.items()
        if name.split == "test"
    }
    if (gain := gains_over_local(scores, metrics, select_by)) is not None:
        result["gain"] = distribution(gain)
    return {name: numbers for name, numbers in result.items() if numbers}


def named_clients(
    names: Sequence[str], scores: _ScoresByName, metrics: Directions, by: str | None
) -> dict[str, Any]:
    """Returns the three clients with the worst scores, and those that lost against the baseline."""
    result: dict[str, Any] = {}
    for name in candidates(map(str, scores), "test", by)[:1]:
        order = np.argsort(signed_score(name, 1, metrics) * scores[name])  # NaN comes last
        worst = [int(c) for c in order[:3] if not np.isnan(scores[name][c])]
        result["lowest_clients"] = {names[c]: float(scores[name][c]) for c in worst}
    if (gain := gains_over_local(scores, metrics, by)) is not None:
        result["lost_clients"] = [names[client] for client in np.flatnonzero(gain < 0).tolist()]
    return result


def finetuning_samples(algorithm: FederatedAlgorithm, loop: FederatedLoop) -> dict[str, float]:
    """Returns by the number of local steps how many sample gradients `loop.finetune` takes.

    It is the sum over the clients that are fine-tuned, once each: a step has the samples of its
    mini-batch, and the last mini-batch of an epoch those that are left.
    """
    sizes = np.asarray(loop.datamodule.partition.train.sizes)
    apart = np.concatenate([loop.unseen_clients, loop.participation.attacker_ids])
    sizes = np.delete(sizes, apart.astype(np.int64))
    samples = {}
    for steps in loop.finetuning.steps:
        schedule = LocalSchedule(algorithm.batch_size, steps=steps)
        epochs, rest = np.divmod(steps, np.maximum(schedule.steps_per_epoch(sizes), 1))
        of_rest = np.minimum(rest * (algorithm.batch_size or 0), sizes)
        samples[str(steps)] = float((epochs * sizes + of_rest).sum())
    return samples


def peak_memory() -> int | None:
    """Returns the peak memory of this process, or of its GPU, in bytes; None on Windows."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return machine.peak_memory()


def arithmetic(precision: object, device: torch.device) -> dict[str, Any]:
    """Returns the precision of a run, and on a GPU where it uses TF32, with 10 bits of digits."""
    found: dict[str, Any] = {"precision": str(precision)}
    if device.type == "cuda":
        found["tf32"] = {
            "matrix products": torch.backends.cuda.matmul.allow_tf32,
            "convolutions": torch.backends.cudnn.allow_tf32,
        }
    return found


@functools.cache  # to read them takes as long as a small run
def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages, ours included, that change results."""
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    # From the package: a checkout that is not installed has no metadata.
    return {"python": platform.python_version(), "lightning-pfl": __version__, **packages}
