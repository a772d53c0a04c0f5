"""Figures of a run: the clients' labels, scores by round, scores by client, who learns from whom.

The functions return plain data (`pfl.report.plots`), which pictures and the page both show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pfl.report.plots import (
    COLOURS,
    GREY,
    MODEL_COLOURS,
    Bars,
    Curve,
    Figure,
    HeatMap,
    Mark,
    Plot,
)
from pfl.report.run_summary import size
from pfl.scores.names import candidates, scores_among
from pfl.scores.runs import column_names
from pfl.scores.table import ScoreTable

CLASSES = (*COLOURS[:6], GREY, "#8C6D00")
BY_CLASS = ("o", "^", "s", "D", "v", "P")
MODEL_MARKERS = {"global": "o", "personalized": "^", "local": "x"}
MOST_LABELS = 6  # of a client, in the text of a page


# ---- the picture at the end of a run -------------------------------------------------------------


def run_figure(
    rows: list[dict[str, Any]], columns: dict[str, np.ndarray], scores: ScoreTable | None = None
) -> Figure:
    """Returns a figure of label counts, score by round, score by client, and fine-tuning if any.

    Args:
        rows: The rows of `metrics.csv`.
        columns: The columns of `clients.csv`, by name.
        scores: The clients' scores by round, for a band in the second plot.
    """
    labels = [name for name in columns if name.startswith("label_")]
    if labels:
        names = [name.removeprefix("label_") for name in labels]
        owned = label_plot(np.stack([columns[name] for name in labels], 1), names)
    else:
        owned = size_plot(columns["client"], columns["train_samples"], GREY)
    number = score_name(rows)
    tested = {
        name.model: columns[str(name)]
        for name in scores_among(columns, "test")
        if name.model in MODEL_MARKERS and name.number == number
    }
    plots = [owned, round_plot(rows, scores), client_plot(tested, number)]
    points = adaptation_points(rows)
    if any(len(found) > 1 for found in points.values()):
        plots.append(adaptation_plot(points, number))
    return Figure(plots, size=(1 + 4 * len(plots), 3.8), columns=len(plots))


def partition_figure(counts: np.ndarray, names: Sequence[str] | None = None) -> Figure:
    """Returns a figure of the label counts [M, K]; see `label_plot`."""
    return Figure([label_plot(counts, names)], size=(5, 3.8))


def label_plot(counts: np.ndarray, names: Sequence[str] | None = None) -> Plot:
    """Shows the label counts [M, K]: a row per label, a column per client."""
    if names and all(name.isdigit() for name in names):
        names = None
    heat = HeatMap(counts.T, "training samples", names or None, from_zero=False)
    return Plot([heat], title="Who has which labels", xlabel="client", ylabel="label")


def size_plot(clients: np.ndarray, sizes: np.ndarray, colour: str) -> Plot:
    """Shows how many training samples each client has."""
    bars = Bars(clients, sizes, colour)
    return Plot(
        [bars],
        title="Who has how much",
        xlabel="client",
        ylabel="training samples",
        whole="x",
    )


def round_plot(rows: list[dict[str, Any]], scores: ScoreTable | None = None) -> Plot:
    """Shows the mean test score by round; the worst tenth of the clients is dotted.

    If there are scores by round, a band holds the personalized models' (or else the global model's)
    without the lowest and the highest tenth of the clients.
    """
    number = score_name(rows)
    names = scores_among(column_names(rows), "test")
    shown = [n for n in names if n.number == number and n.model in ("global", "personalized")]
    curves = []
    for name in shown:
        look: dict[str, Any] = {"colour": MODEL_COLOURS[name.model]}
        worst = f"{name}_worst10"
        points = [(row["round"], row[str(name)]) for row in rows if str(name) in row]
        x, y = np.array(points, float).T
        band: Mapping[str, np.ndarray] = {}
        if scores is not None and name == shown[-1] and name in scores.names:
            found = scores.over_rounds(name)
            if found and np.array_equal(scores.rounds, x):
                band = found
                look["band"] = f"{name.model}, 80 % of clients"
        curves.append(Curve(name.model, x, y, band.get("q10"), band.get("q90"), **look))
        points = [(row["round"], row[worst]) for row in rows if worst in row]
        if points:
            x, y = np.array(points, float).T
            label = f"{name.model}, worst 10 %"
            curves.append(Curve(label, x, y, colour=look["colour"], line=":"))
    return Plot(
        curves,
        title="Mean over clients",
        xlabel="round",
        ylabel=f"test {number}",
        whole="x",
        grid="both",
        legend=True,
    )


def client_plot(
    scores: Mapping[str, np.ndarray], number: str, first: int = 0, texts: Sequence[str] = ()
) -> Plot:
    """Shows a test score of each client, sorted by that of their first model.

    Args:
        scores: The clients' scores, by model.
        number: The name of the score.
        first: The x of the first client.
        texts: What a page says about each client.
    """
    if not scores:
        return Plot([])
    main = next(iter(scores))
    order = np.argsort(scores[main], kind="stable")
    places = np.arange(first, first + len(order))
    sorted_texts = [texts[client] for client in order if texts]
    curves = []
    for model, values in scores.items():
        look: dict[str, Any] = {"colour": MODEL_COLOURS[model.partition("/")[0]]}
        look |= {"marker": MODEL_MARKERS.get(model, "*"), "line": "", "opacity": 0.8}
        curves.append(Curve(model, places, values[order], texts=sorted_texts, **look))
    return Plot(
        curves,
        title="Each client",
        xlabel=f"clients, by {number} of the {main} model",
        ylabel=f"test {number}",
        whole="x",
        grid="both",
        legend=True,
    )


def adaptation_points(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Returns (steps of fine-tuning, mean test score) in the last evaluation, by kind of model."""
    number = score_name(rows)
    points: dict[str, list[tuple[int, float]]] = {}
    tested = [row for row in rows if scores_among(row, "test")]
    if tested:
        last = tested[-1]
    else:
        last = {}
    for name in scores_among(last, "test"):
        if "/" in name.model and name.number == number:
            points.setdefault(name.kind, []).append((name.steps, last[str(name)]))
    return points


def adaptation_plot(points: Mapping[str, list[tuple[int, float]]], number: str) -> Plot:
    """Shows the mean test score by steps of fine-tuning (`adaptation_points`)."""
    looks = {"finetuned": ("clients that train", "o", "-"), "unseen": ("unseen clients", "s", "--")}
    curves = []
    for kind, pairs in points.items():
        label, marker, line = looks[kind]
        x, y = np.array(pairs, float).T
        curves.append(Curve(label, x, y, colour=MODEL_COLOURS[kind], marker=marker, line=line))
    return Plot(
        curves,
        title="Fine-tuning",
        xlabel="local steps of fine-tuning",
        ylabel=f"test {number}",
        whole="x",
        grid="both",
        legend=True,
    )


def score_name(rows: list[dict[str, Any]]) -> str:
    """Returns "accuracy" if the rows have one, otherwise "loss" (regression)."""
    first = candidates(column_names(rows), "test")
    if first:
        return first[0].number
    return "loss"


# ---- who learns from whom ------------------------------------------------------------------------


def collaboration_figure(
    client: np.ndarray, partner: np.ndarray, weight: np.ndarray, title: str
) -> Figure:
    """Returns a heat map of who learns from whom: a row per client, a column per partner."""
    ids = np.union1d(client, partner)
    matrix = np.zeros((len(ids), len(ids)))
    matrix[np.searchsorted(ids, client), np.searchsorted(ids, partner)] = weight
    names = [f"{number:.0f}" for number in ids]  # a table's numbers are floats
    text = "client %{y} takes %{z:.4f} from client %{x}"
    heat = HeatMap(matrix, "weight", names, names, square=True, text=text)
    plot = Plot([heat], title=title, xlabel="partner", ylabel="client")
    return Figure([plot], size=(5, 4.2))


def matrix_figure(
    values: np.ndarray, models: Sequence[str], sites: Sequence[str], score: str
) -> Figure:
    """Returns a heat map of a score: a row for each model, a column for each client's samples."""
    text = f"model %{{y}} on samples of %{{x}}: {score} %{{z:.4f}}"
    heat = HeatMap(values, score, models, sites, from_zero=False, text=text)
    plot = Plot([heat], title=score, xlabel="samples of", ylabel="model")
    size = (3.5 + 0.35 * min(len(sites), 40), 1.5 + 0.25 * min(len(models), 60))
    return Figure([plot], size=size)


# ---- the features of one client ------------------------------------------------------------------


def embedding_figure(
    panels: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]], targets: np.ndarray, client: int
) -> Figure:
    """Returns a figure of a client's test samples in the plane, a plot for each pair of models.

    Args:
        panels: For each (extractor, classifier) the places [n, 2] and the predicted classes [n].
        targets: The classes [n].
        client: The id of the client, for the title.
    """
    plots = []
    for (extractor, classifier), (places, predicted) in panels.items():
        curves: list[Mark] = []
        for label in np.unique(targets).astype(int):
            look: dict[str, Any] = {"colour": CLASSES[label % len(CLASSES)]}
            look["marker"] = BY_CLASS[label // len(CLASSES) % len(BY_CLASS)]
            x, y = places[targets == label].T
            curves.append(Curve(str(label), x, y, line="", size=26**0.5, outline=1.5, **look))
        wrong = predicted != targets
        x, y = places[wrong].T
        look = {"line": "", "marker": "x", "size": 40**0.5, "outline": 1.2, "colour": "black"}
        curves.append(Curve("", x, y, **look))
        title = f"{extractor} extractor, {classifier} classifier\naccuracy {1 - wrong.mean():.4f}"
        plots.append(Plot(curves, title=title, title_size="medium", xticks={}, yticks={}))
    side = 1
    if len(plots) == 4:
        side = 2
    return Figure(
        plots,
        size=(4.2 * side + 1, 3.6 * side + 0.3),
        columns=side,
        title=f"Test samples of client {client} (t-SNE; black crosses: wrong)",
        legend="right",
        legend_title="class",
    )


# ---- the figures of a run on a page --------------------------------------------------------------


def client_page_figure(table: dict[str, np.ndarray], number: str) -> Figure | None:
    """Returns each client's scores; the text of a client has its labels, sizes, scores and gain.

    Args:
        table: What is known of the clients, by columns [M].
        number: The name of the score.
    """
    kinds = [name for name in table if name.partition("/")[0] in MODEL_COLOURS]
    shown = [kind for kind in kinds if kind in MODEL_MARKERS]
    for adapted in ("finetuned", "unseen"):  # after the most steps
        shown += [kind for kind in kinds if kind.startswith(adapted)][-1:]
    if not shown:
        return None
    scores = {kind: table[kind] for kind in shown}
    texts = [_client_text(table, client, kinds) for client in range(len(table["client"]))]
    return Figure([client_plot(scores, number, first=1, texts=texts)], size=(6, 4))


def _client_text(table: dict[str, np.ndarray], client: int, kinds: Sequence[str]) -> str:
    """Returns what is known of a client, in lines."""
    name = ""
    if "name" in table:
        name = f", {table['name'][client]}"
    lines = [f"client {table['client'][client]:.0f}{name}"]
    sizes = {"training": "train_samples", "validation": "val_samples", "test": "test_samples"}
    known = [f"{table[key][client]:.0f} {word}" for word, key in sizes.items() if key in table]
    if known:
        lines.append(f"samples: {', '.join(known)}")
    labels = ((table[name][client], name[6:]) for name in table if name.startswith("label_"))
    counts = sorted(labels, reverse=True)
    if counts:
        have = [f"{label}: {count:.0f}" for count, label in counts if count]
        more = ""
        if len(have) > MOST_LABELS:
            more = f", and {len(have) - MOST_LABELS} more"
        lines.append(f"labels: {', '.join(have[:MOST_LABELS])}{more}")
    scores = [kind for kind in kinds if not np.isnan(table[kind][client])]
    lines += [f"{kind}: {table[kind][client]:.4f}" for kind in scores]
    if "gain" in table and not np.isnan(table["gain"][client]):
        lines.append(f"gain over local: {table['gain'][client]:+.4f}")
    ways = {"sent": "uplink_bytes", "received": "downlink_bytes"}
    sent = [f"{word} {size(table[key][client])}" for word, key in ways.items() if key in table]
    if sent:
        lines.append(", ".join(sent))
    return "\n".join(lines)


def label_page_figure(table: dict[str, np.ndarray]) -> Figure | None:
    """Returns the label counts as a heat map, or the clients' sizes if there are no labels.

    None if the sizes are not known.
    """
    if "train_samples" not in table:
        return None
    ids = table["client"].astype(int)
    labels = [name for name in table if name.startswith("label_")]
    if labels:
        counts = np.stack([table[name] for name in labels])
        names = [name.removeprefix("label_") for name in labels]
        text = "client %{x}, label %{y}: %{z} training samples"
        heat = HeatMap(counts, "samples", names, _column_names(table, ids), text=text)
        plot = Plot([heat], title="Who has which labels", xlabel="client", ylabel="label")
    else:
        plot = size_plot(ids, table["train_samples"], COLOURS[0])
    return Figure([plot], size=(6, 3.8))


def _column_names(table: dict[str, np.ndarray], ids: np.ndarray) -> Sequence[Any]:
    """Returns the clients' names if each has its own, or else their ids, as text if some miss."""
    names: list[Any] = ids.tolist()
    if len(ids) and len(ids) != ids.max() + 1:
        names = [str(number) for number in ids]
    if "name" in table:
        names = [str(name) for name in table["name"]]
    if len(set(names)) < len(names):
        return ids.tolist()
    return names
