"""The leaderboard of twenty problems: its data, tables, tests and figure.

    pfl reproduce results/leaderboard20/rounds
    python -m benchmarks.leaderboard20 runs/reproduce/rounds    # the data, tables and figure
    python -m benchmarks.leaderboard20                          # tables and figure of the data

docs/data/results/leaderboard20 has what `pfl reproduce` writes (rounds), and the accuracy of each
client in the round that counts (clients). What is computed stands in
docs/record/leaderboard20-protocol.md. Whatever has rows in the data is compared, so that another
method joins by its rows.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks import published
from pfl.files import write_figure
from pfl.report.matplotlib_drawer import draw
from pfl.report.plots import COLOURS, GREY, Curve, Figure, Mark, Plot
from pfl.report.table import Table, markdown
from pfl.scores.names import ScoreName
from pfl.scores.runs import find_runs, read_runs
from pfl.scores.statistics import holm, mean_ranks, seeds_test

FOLDER = "results/leaderboard20"
FIGURE = Path(__file__).parents[1] / "docs" / "images" / "results" / "leaderboard20-differences.png"
BASELINE = "FedAvg + fine-tuning"
MARGIN = 1.0  # points within which two methods are equivalent
COUNTS = ("finetuned/1", "finetuned/3", "finetuned/10", "finetuned/30", "personalized", "global")


def model_of(row: Mapping[str, object]) -> str:
    """Returns the model that counts, in a row that has the accuracy of each model."""
    return next(model for model in COUNTS if row.get(f"val/{model}/accuracy") not in (None, ""))


def clients(folder: Path) -> Iterator[dict[str, object]]:
    """Yields the accuracy of each client in the round of each run that counts, and its gradients.

    Those of fine-tuning count once for each client.
    """
    for run in read_runs(find_runs([folder], "leaderboard20")):
        method, _, problem = run.label.partition(", problem ")
        if run.diverged:
            continue
        model = model_of(run.rows[-1])
        best = max(run.rows, key=lambda row: row.get(f"val/{model}/accuracy", -1.0))
        found = run.client_scores(best, ScoreName("test", model, "accuracy"))
        if found is None:
            raise ValueError(f"{run.folder}: there are no scores of clients")
        gradients = run.rows[-1]["train/samples"] + run.finetuning_samples(model)
        for client, score in enumerate(found):
            if not np.isnan(score):
                yield {
                    "run": method,
                    "problem": problem,
                    "seed": run.seed,
                    "round": int(best["round"]),
                    "gradients": int(gradients),
                    "client": client,
                    "accuracy": f"{score:.6f}",
                }


@dataclass(frozen=True)
class Test:
    """The differences of a method to the baseline over problems, in points, and their tests.

    Attributes:
        differences: A difference for each problem.
        low, high: The ends of the 95 % interval of the mean, by Student's t.
        wilcoxon, student, equivalence: p-values before Holm; of the third, that the mean is at
            least `MARGIN` from 0.
    """

    differences: np.ndarray
    low: float
    high: float
    wilcoxon: float
    student: float
    equivalence: float

    @classmethod
    def of(cls, differences: np.ndarray) -> "Test":
        count = len(differences)
        error = differences.std(ddof=1) / np.sqrt(count)
        test = seeds_test(differences, 0.05)
        mean = test.difference
        above = stats.t.sf((mean + MARGIN) / error, count - 1)
        below = stats.t.sf((MARGIN - mean) / error, count - 1)
        return cls(
            differences,
            test.low,
            test.high,
            float(stats.wilcoxon(differences.round(6)).pvalue),  # the data's digits: ties are ties
            test.p,
            float(max(above, below)),
        )

    def found(self, alpha: float = 0.05, power: float = 0.8) -> float:
        """Returns the true difference that a t-test at this level finds with this power."""
        count = len(self.differences)
        least = stats.t.ppf(1 - alpha / 2, count - 1)
        error = self.differences.std(ddof=1) / np.sqrt(count)
        sizes = np.linspace(0, 10, 10001)
        powers = stats.nct.sf(least, count - 1, sizes) + stats.nct.cdf(-least, count - 1, sizes)
        return float(sizes[np.argmax(powers >= power)] * error)

    def power_of_equivalence(self, alpha: float = 0.05) -> float:
        """Returns how often equivalence is shown where the true difference is 0."""
        count = len(self.differences)
        drawn = np.random.default_rng(0).normal(size=(20000, count))
        drawn *= self.differences.std(ddof=1)
        error = drawn.std(axis=1, ddof=1) / np.sqrt(count)
        limit = MARGIN - stats.t.ppf(1 - alpha, count - 1) * error
        return float((np.abs(drawn.mean(axis=1)) < limit).mean())


class Board:
    """The scores of all methods at all problems, in points: [problems, seeds] by method."""

    def __init__(self) -> None:
        runs: dict[tuple[str, str, str], list[dict[str, str]]] = {}
        for row in published.rows(f"{FOLDER}/rounds"):
            runs.setdefault((row["run"], row["problem"], row["seed"]), []).append(row)
        self.methods = list(dict.fromkeys(key[0] for key in runs))
        self.problems = list(dict.fromkeys(key[1] for key in runs))
        self.seeds = list(dict.fromkeys(key[2] for key in runs))
        self.scores = {}
        for method in self.methods:
            values = [[_score(runs[method, p, s]) for s in self.seeds] for p in self.problems]
            self.scores[method] = 100 * np.array(values)
        self.clients = published.rows(f"{FOLDER}/clients")

    def test(self, method: str) -> Test:
        return Test.of((self.scores[method] - self.scores[BASELINE]).mean(axis=1))

    def tests(self) -> dict[str, Test]:
        """Returns the tests of all methods, the one with the largest mean first."""
        found = {method: self.test(method) for method in self.methods if method != BASELINE}
        return dict(sorted(found.items(), key=lambda item: -item[1].differences.mean()))

    def gradients(self, method: str) -> float:
        """Returns how many gradients a method takes for each of FedAvg's, the mean of problems."""
        spent: dict[tuple[str, str], float] = {}
        for row in self.clients:
            spent[row["run"], row["problem"]] = float(row["gradients"])
        return float(np.mean([spent[method, p] / spent["FedAvg", p] for p in self.problems]))

    def table(self) -> Table:
        tests = self.tests()
        families = {
            name: dict(zip(tests, holm([getattr(t, name) for t in tests.values()]), strict=True))
            for name in ("wilcoxon", "student", "equivalence")
        }
        means = np.stack([self.scores[method].mean(axis=1) for method in self.methods], axis=1)
        ranks = dict(zip(self.methods, mean_ranks(means), strict=True))
        heads = [
            "method",
            "accuracy",
            "difference",
            "95 % interval",
            "Wilcoxon",
            "t",
            "equivalence",
        ]
        heads += ["better, worse by a point", "gradients", "mean rank"]
        lines: list[list[str]] = []
        for method in sorted(self.methods, key=lambda one: -self.scores[one].mean()):
            cells = [method, f"{self.scores[method].mean():.2f}"]
            if method == BASELINE:
                cells += ["–"] * 6
            else:
                one = tests[method]
                cells += [f"{one.differences.mean():+.2f}", f"{one.low:+.2f} to {one.high:+.2f}"]
                cells += [_p(family[method]) for family in families.values()]
                better = int((one.differences > MARGIN).sum())
                worse = int((one.differences < -MARGIN).sum())
                cells.append(f"{better}, {worse}")
            lines.append([*cells, f"{self.gradients(method):.2f}", f"{ranks[method]:.2f}"])
        return Table(heads, lines)

    def power(self) -> Table:
        """Returns what twenty problems can find, by the deviations that were measured."""
        heads = ["method", "deviation of problems", "of a seed", "found with 80 %", "equivalence"]
        lines = []
        for method, one in self.tests().items():
            seeds = self.scores[method] - self.scores[BASELINE]
            cells = [f"{one.differences.std(ddof=1):.2f}"]
            if len(self.seeds) > 1:
                cells.append(f"{np.sqrt(seeds.var(axis=1, ddof=1).mean()):.2f}")
            else:
                cells.append("–")
            cells += [f"{one.found():.2f}", f"{one.power_of_equivalence():.2f}"]
            lines.append([method, *cells])
        return Table(heads, lines)

    def problem_table(self) -> Table:
        lines = []
        for number, problem in enumerate(self.problems):
            values = [f"{self.scores[method][number].mean():.1f}" for method in self.methods]
            lines.append([problem, *values])
        return Table(["problem", *self.methods], lines)

    def interval(self, method: str, problem: str) -> tuple[float, float, float]:
        """Returns the difference at a problem and its 95 % interval over the clients, in points."""
        means = []
        variances = []
        counts = []
        for seed in self.seeds:
            own = self._of_clients(method, problem, seed)
            base = self._of_clients(BASELINE, problem, seed)
            paired = np.array([own[client] - base[client] for client in own.keys() & base.keys()])
            means.append(paired.mean())
            variances.append(paired.var(ddof=1) / len(paired))
            counts.append(len(paired))
        half = stats.t.ppf(0.975, min(counts) - 1) * np.sqrt(sum(variances)) / len(self.seeds)
        mean = float(np.mean(means))
        return mean, mean - half, mean + half

    def _of_clients(self, method: str, problem: str, seed: str) -> dict[str, float]:
        return {
            row["client"]: 100 * float(row["accuracy"])
            for row in self.clients
            if (row["run"], row["problem"], row["seed"]) == (method, problem, seed)
        }

    def figure(self) -> Figure:
        """Returns a plot for each method: its difference at each problem, and over problems."""
        tests = self.tests()
        order = np.argsort(-self.test("LocalTrain").differences)
        intervals = {(m, p): self.interval(m, p) for m in tests for p in self.problems}
        sides = [side for _, low, high in intervals.values() for side in (low, high)]
        plots = []
        for number, (method, test) in enumerate(tests.items()):
            marks: list[Mark] = []
            ends = np.array([-1.5, len(order) - 0.5])
            for x, line in ((-MARGIN, ":"), (0.0, "-"), (MARGIN, ":")):
                marks.append(Curve("", np.full(2, x), ends, line=line, colour=GREY, width=0.8))
            for row, place in enumerate(order):
                mean, low, high = intervals[method, self.problems[place]]
                y = np.full(2, float(row))
                marks.append(Curve("", np.array([low, high]), y, width=1.2))
                marks.append(Curve("", np.array([mean]), y[:1], line="", marker="o", size=4))
            look = {"colour": COLOURS[1], "width": 2.5}
            y = np.full(2, -1.0)
            marks.append(Curve("", np.array([test.low, test.high]), y, **look))  # type: ignore[arg-type]
            whole = np.array([test.differences.mean()])
            marks.append(Curve("", whole, y[:1], line="", marker="D", size=6, colour=COLOURS[1]))
            ticks = {float(row): "" for row in range(-1, len(order))}
            if number == 0:
                ticks[-1.0] = "all problems"
                for row, place in enumerate(order):
                    ticks[float(row)] = self.problems[place]
            plots.append(
                Plot(
                    marks,
                    title=method,
                    title_size="medium",
                    xlabel="points",
                    xlim=(min(sides) - 1, max(sides) + 1),
                    ylim=(-1.7, len(order) - 0.3),
                    yticks=ticks,
                )
            )
        return Figure(plots, size=(2.0 * len(plots), 5.0), columns=len(plots))


def _score(rows: list[dict[str, str]]) -> float:
    """Returns the test accuracy in the first of the rounds that are best on validation data."""
    if rows[-1]["diverged"] == "1":
        raise ValueError("a run diverged; the protocol says what counts")
    model = model_of(rows[-1])
    evaluated = [row for row in rows if row[f"val/{model}/accuracy"]]
    best = max(evaluated, key=lambda row: float(row[f"val/{model}/accuracy"]))
    return float(best[f"test/{model}/accuracy"])


def _p(value: float) -> str:
    if value < 0.001:
        return "< 0.001"
    return f"{value:.3f}"


if __name__ == "__main__":
    if folders := sys.argv[1:]:
        rows = [row for folder in folders for row in clients(Path(folder))]
        published.publish(f"{FOLDER}/clients", rows)
    board = Board()
    for table in (board.table(), board.power(), board.problem_table()):
        print(f"{markdown(table)}\n")
    write_figure(FIGURE, draw(board.figure()))
