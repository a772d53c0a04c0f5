"""The leaderboard's tables and figure.

    pfl compare runs/tune/leaderboard/tuned.yaml
    python -m benchmarks.leaderboard runs/compare/tuned    # the data, tables and figure
    python -m benchmarks.leaderboard                       # tables and figure of the data

A row of docs/data/results/leaderboard/rounds is a model of a run in an evaluated round. What is
computed stands in docs/record/leaderboard-protocol.md.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from benchmarks import published
from pfl.report.plots import COLOURS
from pfl.report.table import Table, markdown
from pfl.scores.runs import find_runs, read_runs
from pfl.scores.statistics import critical_difference, mean_ranks

DATA = "results/leaderboard/rounds"
FIGURE = Path("docs/images/results/leaderboard-curves.png")
MODELS = ("finetuned/10", "personalized", "global")  # the first that a method has is its main one
BOUND = "GlobalTrain"
Row = dict[str, float]
Key = tuple[str, str, str, str]  # problem, method, model, seed


def records(folder: Path) -> Iterator[dict[str, object]]:
    """Yields each model of each run in each evaluated round."""
    for run in read_runs(find_runs([folder], "compare")):
        if not (run.finished or run.diverged):
            continue
        known = [m for m in MODELS if any(f"val/{m}/accuracy" in row for row in run.rows)]
        for model in known:
            method, _, problem = run.label.partition(", problem ")
            what = {"problem": problem, "method": method, "model": model, "seed": run.seed}
            for row in run.rows:
                if f"val/{model}/accuracy" in row:
                    both = row["comm/uplink_bytes"] + row["comm/downlink_bytes"]
                    yield {
                        **what,
                        "diverged": int(run.diverged),
                        "round": int(row["round"]),
                        "gradients": int(row["train/samples"]),
                        "bytes": int(both),
                        "validation": f"{row[f'val/{model}/accuracy']:.6f}",
                        "test": f"{row[f'test/{model}/accuracy']:.6f}",
                        "worst10": f"{row[f'test/{model}/accuracy_worst10']:.6f}",
                    }


def read() -> dict[Key, list[Row]]:
    """Returns the rounds of every model of every run, in the order of the file."""
    runs: dict[Key, list[Row]] = {}
    for row in published.rows(DATA):
        key = (row.pop("problem"), row.pop("method"), row.pop("model"), row.pop("seed"))
        runs.setdefault(key, []).append({k: float(v) for k, v in row.items()})
    return runs


class Board:
    """The scores that count, by problem and by row: a model of a method."""

    def __init__(self, runs: dict[Key, list[Row]]) -> None:
        self.runs = runs
        self.problems = list(dict.fromkeys(key[0] for key in runs))
        self.rows = list(dict.fromkeys(key[1:3] for key in runs))

    def of(self, problem: str, row: tuple[str, str]) -> list[list[Row]]:
        """Returns the rounds of each seed."""
        return [rows for key, rows in self.runs.items() if key[0] == problem and key[1:3] == row]

    def scores(
        self, problem: str, row: tuple[str, str], what: str = "test", limit: str | None = None
    ) -> np.ndarray:
        """Returns each seed's number in the round that is best on validation data.

        With a `limit`, "bytes" or "gradients", rounds beyond FedAvg's mean of these do not count.
        NaN for a seed that diverged.
        """
        fedavg = self.of(problem, ("FedAvg", "global"))
        most = np.mean([rows[-1][limit] for rows in fedavg]) * 1.001 if limit else math.inf
        found = []
        for rows in self.of(problem, row):
            within = [one for one in rows if limit is None or one[limit] <= most]
            best = max(within, key=lambda one: one["validation"], default=None)
            found.append(math.nan if best is None or rows[-1]["diverged"] else best[what])
        return np.array(found)

    def means(self, what: str = "test", limit: str | None = None) -> np.ndarray:
        """Returns the means over seeds, [problems, rows]."""
        return np.array(
            [[self.scores(p, row, what, limit).mean() for row in self.rows] for p in self.problems]
        )

    def ranks(self) -> dict[tuple[str, str], float]:
        """Returns the mean ranks over problems; divergence is last, and the bound has none."""
        rows = [row for row in self.rows if row[0] != BOUND]
        means = self.means()[:, [self.rows.index(row) for row in rows]]
        return dict(zip(rows, mean_ranks(np.nan_to_num(means, nan=-1.0)), strict=True))

    def order(self) -> list[tuple[str, str]]:
        """Returns the bound, then the rows by rank."""
        ranks = self.ranks()
        return sorted(self.rows, key=lambda row: ranks.get(row, 0.0))

    def table(self, what: str = "test", limit: str | None = None, ranked: bool = False) -> Table:
        """Returns a row for each model: its number at each problem, in %, and its mean rank."""
        lines: list[list[str | None]] = []
        for row in self.order():
            cells: list[str | None] = list(row)
            for problem in self.problems:
                values = 100 * self.scores(problem, row, what, limit)
                spread = f" ± {values.std(ddof=1):.1f}" if what == "test" and not limit else ""
                cells.append("–" if np.isnan(values).any() else f"{values.mean():.1f}{spread}")
            if ranked:
                rank = self.ranks().get(row)
                cells.append("–" if rank is None else f"{rank:.2f}")
            lines.append(cells)
        return Table(["method", "model", *self.problems, *["mean rank"] * ranked], lines)

    def draw(self) -> None:
        """Draws the main model's accuracy by round at each problem, the mean over seeds."""
        main = {method: model for method, model in reversed(self.rows)}
        main |= {m: next(k for k in MODELS if (m, k) in self.rows) for m in main}
        figure, panels = plt.subplots(
            1, len(self.problems), figsize=(3.2 * len(self.problems), 3.6), layout="constrained"
        )
        styles = [(c, line) for line in ("-", "--") for c in COLOURS]
        for problem, panel in zip(self.problems, np.atleast_1d(panels), strict=True):
            for (colour, line), method in zip(styles, dict(self.rows), strict=False):
                seeds = self.of(problem, (method, main[method]))
                if any(rows[-1]["diverged"] for rows in seeds):
                    continue
                rounds = [one["round"] for one in seeds[0]]
                values = np.mean([[one["test"] for one in rows] for rows in seeds], axis=0)
                panel.plot(rounds, 100 * values, line, color=colour, label=method, linewidth=1.3)
            panel.set(title=problem, xlabel="rounds")
        first = figure.axes[0]
        first.set_ylabel("test accuracy in %")
        figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=7)
        figure.savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    if folders := sys.argv[1:]:
        published.publish(DATA, [one for folder in folders for one in records(Path(folder))])
    board = Board(read())
    for words, table in (
        ("equal rounds", board.table(ranked=True)),
        ("worst tenth", board.table("worst10")),
        ("FedAvg's gradients", board.table(limit="gradients")),
        ("FedAvg's bytes", board.table(limit="bytes")),
    ):
        print(f"{words}\n\n{markdown(table)}\n")
    ranks = board.ranks()
    print(f"critical difference {critical_difference(len(ranks), len(board.problems)):.2f}")
    board.draw()
