"""The result of a run: scores per client, the best round, comparison with the local baseline."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules import FederatedDataModule
from pfl import files
from pfl.communication import Ledger
from pfl.method.algorithm import FederatedAlgorithm
from pfl.rounds.evaluation import numbers_of, worst_tenth
from pfl.rounds.loop import FederatedLoop

PACKAGES = ("torch", "lightning", "torchmetrics", "numpy")


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


def compare(columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """Compares the clients' test scores with the local baseline.

    Args:
        columns: Columns of scores as in `clients.csv`.

    Returns:
        The baseline's mean, standard deviation and worst tenth as `local/...`; the shares of
        clients whose federated model is better than, equal to or worse than the baseline as
        `gained`, `equal` and `lost`. The federated model is the personalized one if there is one;
        the score is the accuracy, for regression the loss. Empty without a baseline.
    """
    if "test_local_accuracy" not in columns or np.isnan(columns["test_local_loss"]).all():
        return {}  # no baseline, or no client has test samples
    number, sign = "accuracy", 1
    if np.isnan(columns["test_local_accuracy"]).all():
        number, sign = "loss", -1
    kinds = [k for k in ("personalized", "global") if f"test_{k}_{number}" in columns]
    local = columns[f"test_local_{number}"]
    have = ~np.isnan(local)
    result: dict[str, Any] = {
        f"local/{number}": float(local[have].mean()),
        f"local/{number}_std": float(local[have].std()),
        f"local/{number}_worst10": worst_tenth(local[have] * sign) * sign,
    }
    if kinds:
        gain = sign * (columns[f"test_{kinds[0]}_{number}"] - local)[have]
        shares = {"gained": gain > 0, "equal": gain == 0, "lost": gain < 0}
        result |= {name: float(mask.mean()) for name, mask in shares.items()}
    return result


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


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that could change a result."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }
