"""A file or a data set before any training: columns, types, clients, classes, ranges, samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pfl.datamodules import FederatedDataModule, TensorSamples
from pfl.datamodules.sources.cells import identifiers_of
from pfl.datamodules.sources.encoding import Column as FileColumn
from pfl.datamodules.sources.encoding import gaps_of
from pfl.datamodules.sources.table_files import read_table
from pfl.report.partition import partition_columns, partition_text
from pfl.report.table import Cell, Column, Table, text

WIDE = 10  # a range of values that makes steps of usual rates large
MOST_COLUMNS = 40  # of a table that is printed
MOST_CLASSES = 20
SHOWN = 3  # samples, and rows of a file
_SOME = 1024  # samples of which the ranges of streamed data are taken
_KINDS = {"b": "true or false", "i": "whole numbers", "u": "whole numbers", "f": "numbers"}


def table_text(path: Path) -> str:
    """Returns what stands in a CSV or Parquet file, a line for each column."""
    said: list[str] = []
    table = read_table(path, said)
    number = len(next(iter(table.values())).values)
    heads = ["column", "type", "different", "missing", "least", "most"]
    heads.append(f"first {min(SHOWN, number)} rows")
    rows: list[list[Cell]] = []
    for name, column in [*table.items()][:MOST_COLUMNS]:
        rows.append([name, *_about(column)])
    lines = [f"{path}: {number} rows, {len(table)} columns", ""]
    lines += [
        f"  {line}" for line in text(Table([Column(head) for head in heads], rows)).splitlines()
    ]
    if len(table) > MOST_COLUMNS:
        lines.append(f"  and {len(table) - MOST_COLUMNS} columns more")
    return "\n".join([*lines, *said])


def _about(column: FileColumn) -> list[Cell]:
    """Returns type, numbers of different and of missing values, least, most, and the first."""
    gaps = gaps_of(column.values)
    known = column.values[~gaps].tolist()
    names = column.values
    if column.cells is not None:
        names = identifiers_of(column.cells)
    different = len({str(name) for name in names[~gaps_of(names)]})
    shown = column.values.tolist()
    if column.cells is not None:
        shown = list(column.cells)
    first = ", ".join(str(value) for value in shown[:SHOWN])
    kind = _kind(known)
    least = ""
    most = ""
    if known and kind in _KINDS.values():
        least = f"{min(known):g}"
        most = f"{max(known):g}"
    if kind == _KINDS["i"] and names.dtype.kind == "O" and column.values.dtype.kind != "O":
        kind = "text of digits"  # 007 and 7 are two ids
    return [kind, f"{different:,}", f"{gaps.sum():,}", least, most, first]


def _kind(known: list[object]) -> str:
    """Returns in words what the values of a column are."""
    if not known:
        return "nothing"
    if isinstance(known[0], list):
        return "lists"
    array = np.array(known)
    return _KINDS.get(array.dtype.kind, type(known[0]).__name__.replace("str", "text"))


def data_text(data: FederatedDataModule) -> str:
    """Returns the inputs, the targets, the clients and three samples of a data set in words."""
    samples = data.samples
    if isinstance(samples, TensorSamples):
        inputs = samples.inputs
    else:
        inputs = samples.gather(torch.arange(min(len(samples), _SOME)))[0]
    lines = [_inputs(data, inputs, len(samples)), "", _targets(data), ""]
    lines += [partition_text(data, partition_columns(data)), "", _three(data)]
    if data.conversions:
        lines += ["", "Changed while reading:", *(f"  {line}" for line in data.conversions)]
    return "\n".join(lines)


def _inputs(data: FederatedDataModule, inputs: Tensor, number: int) -> str:
    """Returns shape, type and ranges of the inputs as they are stored."""
    shape = ", ".join(map(str, [f"{number:,}", *inputs.shape[1:]]))
    title = f"Inputs: {str(inputs.dtype).removeprefix('torch.')} [{shape}]"
    if len(inputs) < number:
        title += f"; of the first {len(inputs):,}"
    names = data.feature_names
    if names is None or inputs.ndim not in (2, 3):
        if not inputs.numel():
            return title
        values = inputs.double()
        return f"{title}, from {values.min():g} to {values.max():g}, mean {values.mean():.4g}"
    flat = inputs.double()
    if inputs.ndim == 3:  # windows of a series, [N, F, W]
        flat = flat.transpose(1, 2).reshape(-1, len(names))
    heads = [Column("input"), *(Column(head, ".5g") for head in ("least", "mean", "most"))]
    rows: list[list[Cell]] = []
    for k, name in enumerate(names[:MOST_COLUMNS]):
        column = flat[:, k]
        rows.append([name, float(column.min()), float(column.mean()), float(column.max())])
    lines = [title, *(f"  {line}" for line in text(Table(heads, rows)).splitlines())]
    if len(names) > MOST_COLUMNS:
        lines.append(f"  and {len(names) - MOST_COLUMNS} inputs more")
    return "\n".join(lines)


def _targets(data: FederatedDataModule) -> str:
    """Returns the classes with their numbers of samples, or the range of the values."""
    targets = data.samples.targets
    if targets is None:
        return "Targets: values, which are streamed"
    shape = ", ".join(map(str, targets.shape))
    if not data.has_labels:
        low = targets.double().min()
        high = targets.double().max()
        kind = "labels"
        if targets.is_floating_point():
            kind = "values"
        line = f"Targets: {kind} [{shape}], from {low:g} to {high:g}"
        if data.scale_targets == "client":
            line += " in the units of their clients"
        if not targets.is_floating_point():
            line += f"; {_places(targets)}"
        if targets.is_floating_point() and high - low > WIDE and not data.scale_targets:
            line += "; scale_targets: true trains them at usual rates"
        return line
    counts = torch.bincount(targets, minlength=data.num_classes or 0).tolist()
    names = data.class_names or [str(k) for k in range(len(counts))]
    pairs = zip(names[:MOST_CLASSES], counts, strict=False)
    shown = ", ".join(f"{k} = {name} ({count:,})" for k, (name, count) in enumerate(pairs))
    if len(names) > MOST_CLASSES:
        shown += ", ..."
    return f"Targets: {len(names)} classes (samples): {shown}"


def _places(targets: Tensor) -> str:
    """Returns how many pixels or tokens have each class."""
    classes, counts = targets.unique(return_counts=True)
    pairs = zip(classes.tolist()[:MOST_CLASSES], counts.tolist(), strict=False)
    shown = ", ".join(f"{k} ({count / targets.numel():.2%})" for k, count in pairs)
    if len(classes) > MOST_CLASSES:
        shown += ", ..."
    return f"classes (share): {shown}"


def _first(data: FederatedDataModule) -> list[tuple[int, int]]:
    """Returns client and place of the first training sample of the first clients that have one."""
    found = []
    sizes = np.asarray(data.client_sizes)
    for client in np.flatnonzero(sizes).tolist()[:SHOWN]:
        found.append((client, 0))
    place = 1
    while len(found) < SHOWN and place < sizes.max():  # there are fewer clients
        for client in np.flatnonzero(sizes > place).tolist()[: SHOWN - len(found)]:
            found.append((client, place))
        place += 1
    return found[:SHOWN]


def _three(data: FederatedDataModule) -> str:
    """Returns three training samples as the network gets them."""
    lines = ["Samples, as a network gets them:"]
    clients = data.client_names
    for client, place in _first(data):
        inputs, target = data.dataset(client)[place]
        name = str(client)
        if clients is not None:
            name = clients[client]
        shown = f"[{', '.join(map(str, inputs.shape))}]"
        if inputs.ndim == 1:
            values = [f"{value:.5g}" for value in inputs[:MOST_COLUMNS].tolist()]
            if data.feature_names is not None:
                pairs = zip(data.feature_names, values, strict=False)
                values = [f"{column} {value}" for column, value in pairs]
            shown = ", ".join(values)
        goal = str(target.tolist())
        if target.numel() > SHOWN:
            goal = f"targets {list(target.shape)}"
        if data.class_names is not None and target.ndim == 0:
            goal = data.class_names[int(target)]
        lines.append(f"  client {name}: {shown} -> {goal}")
    return "\n".join(lines)


def has_images(data: FederatedDataModule) -> bool:
    """Returns whether the inputs can be drawn: [C, H, W] with one or three channels, or [H, W]."""
    shape = data.samples.input_shape
    if len(shape) == 2:
        return data.feature_names is None  # else windows of a series
    return len(shape) == 3 and shape[0] in (1, 3)


def write_picture(data: FederatedDataModule, path: Path) -> None:
    """Draws three samples as they are stored, in gray or in colour, above the classes of pixels."""
    from matplotlib.figure import Figure

    from pfl.files import write_figure
    from pfl.report.matplotlib_drawer import without_math

    targets = data.samples.targets
    size = data.samples.input_shape[-2:]
    pixels = targets is not None and targets.shape[1:] == size and not targets.is_floating_point()
    rows = 1
    if pixels:
        assert targets is not None
        rows = 2
        names = targets.unique()
    figure = Figure(figsize=(6, 2.4 * rows), layout="constrained")
    clients = data.client_names
    panels = figure.subplots(rows, SHOWN, squeeze=False)
    for axes in panels.flat:
        axes.axis("off")
    for number, (client, place) in enumerate(_first(data)):
        axes = panels[0, number]
        index = torch.tensor([int(data.partition.train[client][place])])
        image, target = (part[0] for part in data.samples.gather(index))
        if image.ndim == 2:
            image = image[None]
        shown = image.permute(1, 2, 0).float().numpy().clip(0, 1)
        axes.imshow(shown, cmap="gray", vmin=0, vmax=1)
        if pixels:
            colours = torch.searchsorted(names, target)  # 255, "no class", is not far from others
            panels[1, number].imshow(colours.numpy(), cmap="viridis", vmin=0, vmax=len(names) - 1)
        name = str(client)
        if clients is not None:
            name = clients[client]
        axes.set_title(without_math(name))
    write_figure(path, figure)
