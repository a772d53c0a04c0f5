"""What parties tell of their samples and programs before the first round, as tables."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pfl.datamodules.samples.samples import TensorSamples
from pfl.deploy.data import OwnSamples
from pfl.deploy.schema import OVERVIEW, one_line
from pfl.report.table import Column, Table, text

PACKAGES = ("lightning-pfl", "torch", "lightning", "numpy", "flwr")
SHOWN = 40  # rows of a table
NAME = 40  # letters of a name in it


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages on which results depend."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def other_versions(theirs: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
    """Returns a text such as "torch 2.9.0 (here 2.8.0)" for each package of another version."""
    found = []
    for name, version in theirs.items():
        if own.get(name) != version:
            found.append(f"{name} {version} (here {own.get(name, 'none')})")
    return found


def overview_of(data: OwnSamples) -> dict[str, Any]:
    """Returns class counts, missing cells and ranges of a party's samples, as plain values.

    Args:
        data: The party's samples, which are set up.

    Returns:
        `classes`: how many training samples each class has. `missing`: how many cells of each
        column have no value. `ranges`: the least and the largest value of each column. The last
        two are of all samples, as they are read, before the transforms; of inputs that have no
        columns there is one range. None: it does not exist, or would need each image to be read.
    """
    own = data.own
    every = [np.asarray(part[data.client_id], np.int64) for part in data.partition.splits.values()]
    rows = np.unique(np.concatenate(every))
    found: dict[str, Any] = dict.fromkeys(OVERVIEW)
    if own.has_labels:
        targets = own.partition.targets
        assert targets is not None
        labels = targets[np.asarray(data.partition.train[data.client_id], np.int64)]
        found["classes"] = np.bincount(labels, minlength=own.num_classes or 0).tolist()
    if own.missing_cells is not None:
        found["missing"] = own.missing_cells[rows].sum(0).tolist()
    elif data.feature_names is not None:
        found["missing"] = [0] * len(data.feature_names)
    if isinstance(own.samples, TensorSamples):
        values = own.samples.inputs[torch.from_numpy(rows)].double()
        width = 1
        if data.feature_names is not None and values.shape[-1] == len(data.feature_names):
            width = values.shape[-1]
        columns = values.reshape(-1, width)
        if len(columns) and columns.isfinite().all():
            pairs = torch.stack([columns.amin(0), columns.amax(0)], 1)
            found["ranges"] = pairs.tolist()
    return found


def overview_text(
    told: Mapping[str, Mapping[str, Any]],
    class_names: Sequence[str] | None,
    feature_names: Sequence[str] | None,
) -> str:
    """Returns tables of what is told: classes and columns as rows, parties as columns.

    Args:
        told: The overviews by the words for a party; what is not told is None, or not there.
        class_names: The names of the classes, if they have names.
        feature_names: The names of the columns, if they have names.
    """
    counts = {}
    cells = {}
    for who, one in told.items():
        if one.get("classes"):
            counts[who] = [str(count) for count in one["classes"]]
        if one.get("ranges") or one.get("missing"):
            cells[who] = _cells(one.get("ranges"), one.get("missing"))
    found = []
    for head, columns, names in (
        ("training samples of class", counts, class_names),
        ("values of", cells, feature_names),
    ):
        if columns:
            found.append(_table(head, columns, names))
    return "\n".join(found)


def _cells(ranges: list[list[float]] | None, missing: list[int] | None) -> list[str]:
    """Returns for each column its range and how many values are missing, in words."""
    found = []
    for place in range(len(ranges or missing or ())):
        words = []
        if ranges is not None:
            least, most = ranges[place]
            words.append(f"{least:g} to {most:g}")
        if missing is not None and place < len(missing) and missing[place]:
            words.append(f"{missing[place]} missing")
        elif missing is not None and ranges is None:
            words.append("none missing")
        found.append(", ".join(words))
    return found


def _table(head: str, columns: Mapping[str, list[str]], names: Sequence[str] | None) -> str:
    """Returns a table of texts by the words for a party; names may lack those of the rows."""
    count = max(map(len, columns.values()))
    if names is None or len(names) < count:
        names = [str(place) for place in range(count)]
        if count == 1:
            names = ["inputs"]
    rows: list[list[Any]] = []
    for place in range(min(count, SHOWN)):
        row: list[Any] = [one_line(names[place])[:NAME]]
        for values in columns.values():
            cell = ""
            if place < len(values):
                cell = values[place]
            row.append(cell)
        rows.append(row)
    shown = text(Table([Column(head), *map(Column, columns)], rows))
    if count > SHOWN:
        shown += f"and {count - SHOWN} more rows\n"
    return shown
