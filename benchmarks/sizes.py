"""Networks of five sizes in one federation: the data, tables and figure.

    python -m benchmarks.sizes --data                      # data/sizes, of Fashion-MNIST's images
    python -m benchmarks.sizes runs/compare/sizes          # the published data, tables and figure
    python -m benchmarks.sizes                             # tables and figure of the published data

docs/record/sizes-protocol.md says what is computed. docs/data/results/sizes/clients has, for each
client in each evaluated round of each run, its accuracy with the model that counts, and what the
run has spent until then. Whatever has rows there is compared, so that another method joins by its
rows.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import published
from benchmarks.images import fashion_mnist
from pfl.files import write_figure
from pfl.report.matplotlib_drawer import draw
from pfl.report.plots import GREY, Curve, Figure, Mark, Plot
from pfl.report.table import Table, markdown
from pfl.scores.names import ScoreName
from pfl.scores.runs import Run, find_runs, read_runs
from pfl.scores.statistics import seeds_test

DATA = "results/sizes/clients"
FIGURE = Path(__file__).parents[1] / "docs" / "images" / "results" / "sizes-gains.png"
SIZES = ("2 M", "520 k", "160 k", "40 k", "10 k")  # client i has the (i mod 5)-th
BASELINE = "clients alone"
BUDGETS = (1, 10, 100)  # MB of all clients in all rounds, up and down
KINDS = ("finetuned/1", "finetuned/3", "finetuned/10", "finetuned/30", "personalized")
CLIENT_IMAGES = 8000
PUBLIC_IMAGES = 2000


def make_data(folder: Path) -> None:
    """Writes the clients' images of Fashion-MNIST and the public ones into a folder."""
    images, labels = fashion_mnist()
    end = CLIENT_IMAGES + PUBLIC_IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        folder / "clients.npz", inputs=images[:CLIENT_IMAGES], targets=labels[:CLIENT_IMAGES]
    )
    np.savez_compressed(
        folder / "public.npz",
        inputs=images[CLIENT_IMAGES:end],
        targets=np.zeros(PUBLIC_IMAGES, np.int64),
    )


def clients(folder: Path) -> Iterator[dict[str, object]]:
    """Yields the accuracies of each client in each evaluated round of each run, and its costs."""
    for run in read_runs(find_runs([folder], "sizes")):
        if run.diverged:
            continue
        kind = _kind(run)
        for row in run.rows:
            found = [
                run.client_scores(row, ScoreName(split, kind, "accuracy"))
                for split in ("val", "test")
            ]
            if found[0] is None or found[1] is None:
                continue
            sent = row["comm/uplink_bytes"] + row["comm/downlink_bytes"]
            gradients = row["train/samples"] + run.finetuning_samples(kind)
            for client, (val, test) in enumerate(zip(found[0], found[1], strict=True)):
                yield {
                    "run": run.label,
                    "seed": run.seed,
                    "round": int(row["round"]),
                    "bytes": int(sent),
                    "gradients": int(gradients),
                    "client": client,
                    "val": f"{val:.6f}",
                    "test": f"{test:.6f}",
                }


def _kind(run: Run) -> str:
    """Returns the model that counts: fine-tuned, else personalized."""
    last = run.rows[-1]
    for kind in KINDS:
        if f"val/{kind}/accuracy" in last:
            return kind
    raise ValueError(f"{run.folder}: no personalized model was scored")


class Sizes:
    """The accuracies of all methods in points, [seeds, clients], in the round that counts.

    Args:
        limit: The bytes or gradients that a run may have spent in that round, by name.

    Attributes:
        scores: The accuracies of a method. One without a round within the limit has none.
    """

    def __init__(self, limit: tuple[str, float] | None = None) -> None:
        rounds: dict[tuple[str, str], dict[int, list[dict[str, str]]]] = {}
        for row in published.rows(DATA):
            if limit is not None and float(row[limit[0]]) > limit[1]:
                continue
            run = rounds.setdefault((row["run"], row["seed"]), {})
            run.setdefault(int(row["round"]), []).append(row)
        found: dict[str, list[np.ndarray]] = {}
        self.bytes: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        for (method, _), run in rounds.items():
            best = max(run.values(), key=_validation)
            if limit is not None:
                best = run[max(run)]
            found.setdefault(method, []).append(100 * np.array([float(r["test"]) for r in best]))
            last = run[max(run)][0]
            self.bytes[method] = float(last["bytes"])
            self.gradients[method] = float(last["gradients"])
        self.scores = {method: np.stack(values) for method, values in found.items()}

    def gains(self, method: str) -> np.ndarray:
        """Returns the differences to clients alone with the same images, [seeds, clients]."""
        return self.scores[method] - self.scores[BASELINE]

    def table(self) -> Table:
        """Returns the gain of each size over itself alone, with 95 % intervals over seeds."""
        heads = ["method", "accuracy", "gain", *SIZES, "MB", "gradients"]
        lines = [[BASELINE, f"{self.scores[BASELINE].mean():.1f}", "–"]]
        lines[0] += [f"({self.scores[BASELINE][:, i::5].mean():.1f})" for i in range(5)]
        lines[0] += self._costs(BASELINE)
        others = [method for method in self.scores if method != BASELINE]
        for method in sorted(others, key=lambda one: -self.scores[one].mean()):
            gains = self.gains(method)
            cells = [method, f"{self.scores[method].mean():.1f}", _with_interval(gains)]
            cells += [_with_interval(gains[:, i::5]) for i in range(5)]
            lines.append(cells + self._costs(method))
        return Table(heads, lines)

    def figure(self) -> Figure:
        """Returns a plot for each method: the gain of each size, with 95 % intervals over seeds."""
        others = [method for method in self.scores if method != BASELINE]
        others.sort(key=lambda one: -self.scores[one].mean())
        drawn = others[:-1]  # the last one, HeteroFL without fine-tuning, lies far below
        places = np.arange(len(SIZES), dtype=float)
        sides = np.array([-0.5, len(SIZES) - 0.5])
        plots = []
        for method in drawn:
            marks: list[Mark] = [Curve("", sides, np.zeros(2), colour=GREY, width=0.8)]
            for place in places:
                test = seeds_test(self.gains(method)[:, int(place) :: 5].mean(axis=1), 0.05)
                x = np.full(2, place)
                marks.append(Curve("", x, np.array([test.low, test.high]), width=1.2))
                middle = np.array([test.difference])
                marks.append(Curve("", x[:1], middle, line="", marker="o", size=4))
            plots.append(
                Plot(
                    marks,
                    title=method,
                    title_size="small",
                    ylabel="points",
                    ylim=(-7.0, 8.0),
                    xticks=dict(zip(places.tolist(), SIZES, strict=True)),
                )
            )
        return Figure(plots, size=(14.0, 7.0), columns=4)

    def _costs(self, method: str) -> list[str]:
        spent = self.gradients[method] / self.gradients[BASELINE]
        return [f"{self.bytes[method] / 1e6:,.1f}", f"{spent:.2f}"]


def _validation(rows: list[dict[str, str]]) -> float:
    return float(np.mean([float(row["val"]) for row in rows]))


def _with_interval(gains: np.ndarray) -> str:
    """Returns the mean gain with half of its 95 % interval over seeds."""
    test = seeds_test(gains.mean(axis=1), 0.05)
    return f"{test.difference:+.1f} ± {(test.high - test.low) / 2:.1f}"


def budgets() -> Table:
    """Returns the accuracy of each method at equal bytes, and at equal gradients."""
    whole = Sizes()
    parts = [Sizes(("bytes", 1e6 * limit)) for limit in BUDGETS]
    parts.append(Sizes(("gradients", whole.gradients[BASELINE])))
    heads = ["method", *(f"{limit} MB" for limit in BUDGETS), "gradients of clients alone"]
    lines = []
    for method in sorted(whole.scores, key=lambda one: -whole.scores[one].mean()):
        cells = [method]
        for part in parts:
            score = part.scores.get(method)
            cells.append("–" if score is None else f"{score.mean():.1f}")
        lines.append(cells)
    return Table(heads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="?", type=Path)
    parser.add_argument("--data", action="store_true")
    arguments = parser.parse_args()
    if arguments.data:
        make_data(Path("data/sizes"))
        return
    if arguments.runs:
        published.publish(DATA, list(clients(arguments.runs)))
    sizes = Sizes()
    print(markdown(sizes.table()))
    print()
    print(markdown(budgets()))
    write_figure(FIGURE, draw(sizes.figure()))


if __name__ == "__main__":
    main()
