"""Figures of the papers' pages: each method's differences to a baseline, a dot for each seed.

    python -m benchmarks.paper_figures     # docs/images/papers/*-differences.png

Methods are rows, and the paper's own method has the one colour. A line at 0 is the baseline.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.papers import GLOBAL, PERSONALIZED, Lines, last
from pfl.files import write_figure
from pfl.report.plots import COLOURS

FOLDER = Path(__file__).parents[1] / "docs" / "images" / "papers"
Panels = dict[str, dict[str, list[float]]]  # by title and method: accuracies by seed


def fedslr() -> Panels:
    """Returns the personalized accuracies of Table 1 on three data sets."""
    panels: Panels = {}
    for title, file in (("digits", "digits"), ("MNIST", "mnist"), ("Fashion-MNIST", "fashion")):
        found = last(f"results/fedslr-{file}", PERSONALIZED, "run")
        panels[title] = {}
        for (run,), values in found.items():
            # Per-FedAvg has not arrived after 40 rounds; others have no personalized models.
            if run != "Per-FedAvg" and not np.isnan(values).any():
                panels[title][run] = values
    return panels


def fedacs() -> Panels:
    """Returns the accuracies of Figure 1 on Fashion-MNIST; FedAvg's are those of its one model."""
    titles = {
        "(b) 50 samples": "50 images a client",
        "(a) Dirichlet 0.5": "600 images a client",
        "(b) 500 clients": "500 clients, 120 images",
    }
    file = "results/fedacs-fashion/runs"
    own = last(file, PERSONALIZED, "setting", "run")
    common = last(file, GLOBAL, "setting", "run")
    return {title: of_setting(own, common, setting) for setting, title in titles.items()}


def of_setting(own: Lines, common: Lines, *setting: str) -> dict[str, list[float]]:
    """Returns the accuracies of a setting: of the common model where a method has no other."""
    found = {}
    for (*where, run), values in own.items():
        if tuple(where) == setting:
            found[run] = values
            if np.isnan(values).any():
                found[run] = common[(*setting, run)]
    return found


def fedagg() -> Panels:
    """Returns the accuracies of the linear model with 20 % of the clients."""
    panels: Panels = {}
    keys = ("participation", "setting", "run")
    for title, file in (("MNIST", "linear"), ("Fashion-MNIST", "fashion")):
        own = last(f"results/fedagg-{file}", PERSONALIZED, *keys)
        common = last(f"results/fedagg-{file}", GLOBAL, *keys)
        for kind in ("IID", "non-IID"):
            place = ("20 %", f"linear, {kind}")
            panels[f"{title}, {kind}"] = of_setting(own, common, *place)
    return panels


def draw(panels: Panels, method: str, baseline: str, path: Path) -> None:
    """Draws the differences to a baseline in points, the best method of the first panel on top."""
    first = next(iter(panels.values()))
    methods = sorted((run for run in first if run != baseline), key=lambda run: np.mean(first[run]))
    size = (3.2 * len(panels), 0.34 * len(methods) + 1.0)
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
    for ax, (title, scores) in zip(axes[0], panels.items(), strict=True):
        ax.axvline(0, color="#999999", linewidth=1)
        for row, run in enumerate(methods):
            points = 100 * (np.array(scores[run]) - scores[baseline])
            colour = COLOURS[1] if run == method else COLOURS[0]
            ax.plot(points, [row] * len(points), "o", color=colour, markersize=4, alpha=0.6)
            ax.plot(points.mean(), row, "|", color=colour, markersize=14, markeredgewidth=2)
        ax.set_title(f"{title} (n = {len(scores[baseline])})", fontsize=9)
        ax.set_xlabel(f"points above {baseline}", fontsize=8)
        ax.tick_params(labelsize=8)
        ax.grid(axis="x", alpha=0.3)
    axes[0][0].set_yticks(range(len(methods)), methods)
    figure.tight_layout()
    write_figure(path, figure)
    plt.close(figure)


if __name__ == "__main__":
    draw(fedslr(), "FedSLR", "LocalTrain", FOLDER / "fedslr-differences.png")
    draw(fedacs(), "FedACS", "LocalTrain", FOLDER / "fedacs-differences.png")
    draw(fedagg(), "FedAgg", "FedAvg", FOLDER / "fedagg-differences.png")
