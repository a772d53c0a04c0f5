"""The result of a run: scores per client, the best round, comparison with the local baseline."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules import FederatedDataModule
from pfl import files
from pfl.communication import Ledger
from pfl.method.algorithm import FederatedAlgorithm
from pfl.report.distribution import direction, distribution
from pfl.rounds.evaluation import client_mean, numbers_of
from pfl.rounds.loop import FederatedLoop

PACKAGES = ("lightning-pfl", "torch", "lightning", "torchmetrics", "numpy")


@dataclass(frozen=True)
class ClientTable:
    """The table of `clients.csv`, one row for each client, built block by block.

    Attributes:
        data: The data module of the clients.
        scores: Scores of the last evaluation and of the local baseline, [M], by column.
        ledger: The bytes that the clients sent and received.
        unseen: The ids of the clients that never train.
    """

    data: FederatedDataModule
    scores: dict[str, np.ndarray]
    ledger: Ledger
    unseen: np.ndarray

    @classmethod
    def of(
        cls,
        algorithm: FederatedAlgorithm,
        loop: FederatedLoop,
        baseline: dict[str, np.ndarray] | None = None,
    ) -> ClientTable:
        """Returns the table of a run's present state; every process must call this method.

        Args:
            algorithm: The algorithm whose last evaluation counts.
            loop: The loop around the data.
            baseline: The scores of `LocalBaseline`.
        """
        evaluation = getattr(algorithm, "evaluation", None)
        pairs = evaluation.scores.items() if evaluation else ()
        by_name = {f"{split}_{kind}": values for (split, kind), values in pairs}
        if baseline is not None:
            by_name["test_local"] = baseline
        scores = {
            f"{name}_{number}": column
            for name, values in by_name.items()
            for number, column in numbers_of(values).items()
        }
        return cls(loop.datamodule, scores, algorithm.client_bytes(), loop.unseen_clients)

    def columns(self, clients: slice = slice(None)) -> dict[str, np.ndarray]:
        """Returns id, sample counts, label counts, scores and bytes of a range of clients."""
        data, ids = self.data, np.arange(*clients.indices(self.data.num_clients))
        columns = {"client": ids}
        for split in ("train", "val", "test"):
            columns[f"{split}_samples"] = getattr(data.partition, split).sizes[clients]
        if data.has_labels:
            counts = data.label_counts(clients=clients)
            columns |= {f"label_{k}": counts[:, k] for k in range(counts.shape[1])}
        if len(self.unseen):
            columns["unseen"] = np.isin(ids, self.unseen).astype(int)
        columns |= {name: values[clients] for name, values in self.scores.items()}
        received, sent = self.ledger.of(ids)
        return columns | {"uplink_bytes": sent, "downlink_bytes": received}

    def write(self, path: Path) -> None:
        """Writes all rows, block by block."""
        rows = range(0, self.data.num_clients, files.CSV_ROWS)
        blocks = (self.columns(slice(begin, begin + files.CSV_ROWS)) for begin in rows)
        files.write_csv_blocks(path, blocks)


def compare(
    columns: dict[str, np.ndarray], higher_is_better: Mapping[str, bool | None] | None = None
) -> dict[str, Any]:
    """Compares the clients' test scores with the local baseline.

    Args:
        columns: Columns of scores as in `clients.csv`.
        higher_is_better: For each metric beside accuracy and loss whether large values are good.

    Returns:
        The baseline's mean, standard deviation and worst tenth as `local/...`, of metrics as well;
        the shares of clients whose federated model is better than, equal to or worse than the
        baseline as `gained`, `equal` and `lost` (see `gains`). Empty without a baseline.
    """
    if "test_local_accuracy" not in columns:
        return {}
    result: dict[str, Any] = {}
    for name, higher in {"accuracy": True, "loss": False, **(higher_is_better or {})}.items():
        values = columns.get(f"test_local_{name}", np.empty(0))
        values = values[~np.isnan(values)]
        if not len(values) or (name == "loss" and result):  # the loss stands in for the accuracy
            continue
        result |= client_mean(f"local/{name}", values, higher)
    gain = gains(columns)
    if gain is not None:
        shares = {"gained": gain > 0, "equal": gain == 0, "lost": gain < 0}
        have = ~np.isnan(gain)
        result |= {name: float(mask[have].mean()) for name, mask in shares.items()}
    return result


def gains(columns: dict[str, np.ndarray]) -> np.ndarray | None:
    """Returns how much better each client's federated model is than the local baseline, [M].

    The federated model is the personalized one if there is one; the score is the accuracy, for
    regression the loss. NaN for clients without test samples; None without a baseline.

    Args:
        columns: Columns of scores as in `clients.csv`.
    """
    for number, sign in (("accuracy", 1), ("loss", -1)):
        local = columns.get(f"test_local_{number}")
        if local is None or np.isnan(local).all():
            continue
        for kind in ("personalized", "global"):
            if (scores := columns.get(f"test_{kind}_{number}")) is not None:
                return sign * (scores - local)
    return None


def distributions(
    columns: dict[str, np.ndarray], higher_is_better: Mapping[str, bool | None]
) -> dict[str, dict[str, float]]:
    """Returns how test scores, and gains over the local baseline, are distributed over clients.

    Args:
        columns: Columns of scores as in `clients.csv`.
        higher_is_better: For each metric beside accuracy and loss whether large values are good.

    Returns:
        For each column of test scores, and for "gain", what `distribution` returns, unless it is
        empty.
    """
    result = {
        column: distribution(values, direction(column, higher_is_better))
        for column, values in columns.items()
        if column.startswith("test_")
    }
    if (gain := gains(columns)) is not None:
        result["gain"] = distribution(gain)
    return {name: numbers for name, numbers in result.items() if numbers}


def peak_memory() -> int | None:
    """Returns the peak memory of this process in bytes, of the GPU if the process uses one.

    None on Windows: the standard library has no such number there.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@functools.cache  # to read them takes as long as a small run
def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages, ours included, that change results."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }
