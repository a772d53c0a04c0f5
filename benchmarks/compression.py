"""The table of docs/record/compression.md.

    pfl compare results/compression
    python -m benchmarks.compression runs/compare/compression    # runs.csv and the table
    python -m benchmarks.compression                             # the table of runs.csv

A row of runs.csv is a run in the round that counts.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import published
from pfl.report.table import Table, markdown
from pfl.scores.runs import best_round, find_runs, read_runs

DATA = "results/compression/runs"
SLOW = " slow"  # after the name of a method: with a third of the rate
ALL = "all"
PROBLEMS = ("labels", "groups")
METHODS = ("FedAvg", "Ditto", "FedPer", "FedSLR")
TENTH = ("TopK 1/10", "RandomK 1/10", "QSGD 1/10", "PowerSGD 1/10")
THIRTIETH = ("TopK 1/30", "RandomK 1/30", "SignEF 1/30")


def records(folder: Path) -> Iterator[dict[str, object]]:
    """Yields each run."""
    for run in read_runs(find_runs([folder], "compare")):
        method, problem, sent = split(run.label)
        best = best_round(run.rows) if not run.diverged else None
        score = str(best["selected_by"]) if best else ""
        yield {
            "problem": problem,
            "sent": sent,
            "method": method.removesuffix(SLOW),
            "rate": "third" if method.endswith(SLOW) else "tuned",
            "seed": run.seed,
            "diverged": int(run.diverged),
            "round": int(best["round"]) if best else "",
            "validation": f"{best[score]:.6f}" if best else "",
            "test": f"{best[score.replace('val/', 'test/')]:.6f}" if best else "",
            "uplink": int(run.rows[-1]["comm/uplink_bytes"] / run.rows[-1]["round"]),
        }


def split(label: str) -> tuple[str, str, str]:
    """Returns the method, the problem and what is sent of a label of a run."""
    method, _, point = label.partition(", problem ")
    problem, _, sent = point.partition(", sent ")
    return method, problem, sent


class Runs:
    """The runs with the rate that counts, by problem, what is sent, and method."""

    def __init__(self) -> None:
        self.rows = published.rows(DATA)

    def of(self, problem: str, sent: str, method: str) -> list[dict[str, str]]:
        """Returns the runs of the rate with the better validation score, in the order of seeds."""
        known = {"problem": problem, "sent": sent, "method": method}
        found = [row for row in self.rows if known.items() <= row.items()]
        rates: dict[str, list[dict[str, str]]] = {}
        for row in sorted(found, key=lambda row: int(row["seed"])):
            rates.setdefault(row["rate"], []).append(row)
        return max(rates.values(), key=lambda rows: mean(rows, "validation"))

    def accuracies(self, problem: str, sent: str, method: str) -> np.ndarray:
        """Returns the test accuracy of each seed, in %; NaN where the run diverged."""
        return 100 * np.array([number(row["test"]) for row in self.of(problem, sent, method)])

    def bytes_shares(self, sent: str) -> list[float]:
        """Returns the shares of the bytes of everything, of all problems and methods, in %."""
        shares = []
        for problem in PROBLEMS:
            for method in METHODS:
                whole = mean(self.of(problem, ALL, method), "uplink")
                shares.append(100 * mean(self.of(problem, sent, method), "uplink") / whole)
        return shares


def number(text: str) -> float:
    """Returns a number of the file; NaN for an empty cell."""
    return float(text) if text else math.nan


def mean(rows: list[dict[str, str]], column: str) -> float:
    """Returns the mean of a column; minus infinity if a run diverged."""
    values = [number(row[column]) for row in rows]
    return -math.inf if any(map(math.isnan, values)) else float(np.mean(values))


def table(runs: Runs) -> str:
    """Returns the table: accuracies of what sends everything, and points lost below."""
    places = [(problem, method) for problem in PROBLEMS for method in METHODS]
    columns = ["sent", "% of the bytes", *(f"{problem}: {method}" for problem, method in places)]
    lines: list[list[str | None]] = []
    for sent in (ALL, *TENTH, *THIRTIETH):
        shares = runs.bytes_shares(sent)
        cells: list[str | None] = [sent, "100"]
        if sent != ALL:
            cells[1] = f"{min(shares):.1f} to {max(shares):.1f}"
        for problem, method in places:
            scores = runs.accuracies(problem, sent, method)
            if sent != ALL:
                scores = runs.accuracies(problem, ALL, method) - scores
            spread = f"{scores.mean():.1f} ± {np.ptp(scores) / 2:.1f}"
            cells.append("diverged" if np.isnan(scores).any() else spread)
        lines.append(cells)
    return markdown(Table(columns, lines))


def main() -> None:
    """Writes the file if a folder is given, and prints the table."""
    if len(sys.argv) > 1:
        published.publish(DATA, list(records(Path(sys.argv[1]))))
    print(table(Runs()))


if __name__ == "__main__":
    main()
