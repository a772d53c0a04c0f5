"""The tables of the papers' pages and of the page of agreement, from the published data.

    python -m benchmarks.papers     # writes each table between its two marks

The long pages in docs/record have all other tables.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks import published

DOCS = Path(__file__).parents[1] / "docs"
AGREEMENT = DOCS / "compared-with-other-implementations.md"
MARKED = re.compile(r"(<!-- table of (\S+) -->\n)(.*?)(<!-- end of \2 -->)", re.S)
Lines = dict[tuple[str, ...], list[float]]

PERSONALIZED = "test/personalized/accuracy"
GLOBAL = "test/global/accuracy"


def lines_of(name: str, column: str, *keys: str) -> Lines:
    """Returns the values of a column by round, for each place that the keys tell apart."""
    lines: Lines = {}
    for row in published.rows(name):
        place = tuple(row[key] for key in keys)
        lines.setdefault(place, []).append(float(row[column] or "nan"))
    return lines


def last(name: str, column: str, *keys: str) -> Lines:
    """Returns the values of each run's last round by seed, for each place that the keys name."""
    found: Lines = {}
    for place, line in lines_of(name, column, *keys, "seed").items():
        found.setdefault(place[:-1], []).append(line[-1])
    return found


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def spread(values: list[float]) -> str:
    """Returns the mean and the standard deviation in percent."""
    percent = 100 * np.array(values)
    return f"{percent.mean():.2f} ± {percent.std(ddof=1):.2f}"


def each(values: list[float]) -> str:
    """Returns the mean in percent, and each of few seeds, whose deviation would say little."""
    mean = f"{100 * np.mean(values):.2f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({', '.join(f'{100 * value:.2f}' for value in values)})"


def fedslr() -> str:
    """Returns Table 1 on three data sets."""
    sets = {"digits": "digits", "MNIST": "mnist", "Fashion-MNIST": "fashion"}
    of_runs = ("FedSLR", "APFL", "FedPer", "FedRep", "LG-FedAvg", "Ditto", "LocalTrain", "FedSpa")
    of_all = ("FedSLR", "FedDyn", "FedAvg")
    head = [""]
    for name in sets:
        seeds = last(f"results/fedslr-{sets[name]}", PERSONALIZED, "run")["FedSLR",]
        head.append(f"{name}, {len(seeds)} seed{'s' * (len(seeds) > 1)}")
    rows = []
    for end, column, runs in (("", PERSONALIZED, of_runs), (", global", GLOBAL, of_all)):
        for run in runs:
            found = [last(f"results/fedslr-{file}", column, "run")[run,] for file in sets.values()]
            rows.append([f"{run}{end}", *map(each, found)])
    return table(head, rows)


def fedclup() -> str:
    """Returns Figure 1's errors in round 50, and who reaches a level of error first."""
    penalties = ("0.02", "0.1", "0.5")
    runs = [*(f"FedCLUP λ={penalty}" for penalty in penalties)]
    runs += ["LocalTrain", "GlobalTrain (FedAvg)"]
    error = "train/personalized/total_error"
    keys = ("heterogeneity", "run")
    ends = last("fedclup-figure1", error, *keys)
    lines = lines_of("results/fedclup-rounds", error, *keys, "seed")
    head = ["", *(f"λ = {penalty}" for penalty in penalties), "LocalTrain", "GlobalTrain"]
    head += [f"first: λ = {penalty}" for penalty in penalties]
    rows = []
    for radius in ("0.1", "0.5", "2"):
        errors = [np.mean(ends[radius, run]) for run in runs]
        cells = [f"{value:.3f}" for value in errors]
        best = int(np.argmin(errors))
        cells[best] = f"**{cells[best]}**"
        by_seed = []
        for seed in "012":
            by_seed.append(first([lines[radius, run, seed] for run in runs[:3]]))
        shares = [
            ", ".join(f"{share:.0f}" for share in column) for column in zip(*by_seed, strict=True)
        ]
        rows.append([f"R = {radius}", *cells, *(f"{share} %" for share in shares)])
    return table(head, rows)


def first(lines: list[list[float]], levels: int = 1000) -> list[float]:
    """Returns the share of levels, in percent, that each line alone reaches first."""
    low = min(map(min, lines))
    high = max(line[0] for line in lines)
    alone = [0.0] * len(lines)
    for level in low + (high - low) * np.arange(levels) / levels:
        reached = []
        for line in lines:
            reached.append(next((k for k, value in enumerate(line) if value <= level), np.inf))
        if reached.count(min(reached)) == 1:
            alone[int(np.argmin(reached))] += 100 / levels
    return alone


def fedagg_equilibrium() -> str:
    """Returns the rates and the loss of the mean-field iterations."""
    rates = lines_of("fedagg-equilibrium", "rate/2", "run")
    losses = lines_of("fedagg-equilibrium", "test/global/loss", "run")
    rows = []
    for (run,), line in rates.items():
        cells = [f"{line[9]:.2g}", f"{line[59]:.2g}"]
        if run.startswith("FedAvg"):
            cells = ["0.1", "0.1"]
        rows.append([run, *cells, f"{losses[run,][59]:.3f}"])
    return table(["", "rate, round 10", "round 60", "test loss, round 60"], rows)


def fedagg_linear() -> str:
    """Returns the accuracies on MNIST and Fashion-MNIST with 20 % of the clients."""
    columns = []
    for file in ("results/fedagg-linear", "results/fedagg-fashion"):
        common = last(file, GLOBAL, "run", "setting", "participation")
        personal = last(file, PERSONALIZED, "run", "setting", "participation")
        for setting in ("linear, IID", "linear, non-IID"):
            column = {}
            for run in (
                "FedAvg",
                "FedAgg",
                "FedAdam",
                "FedYogi",
                "FedDyn",
            ):
                column[run] = spread(common[run, setting, "20 %"])
            column["FedGH"] = spread(personal["FedGH", setting, "20 %"])
            columns.append(column)
    rows = [[run, *(column[run] for column in columns)] for run in columns[0]]
    sets = ["MNIST, 5 seeds", "Fashion-MNIST, 3 seeds"]
    return table(["", *(f"{name}: {kind}" for name in sets for kind in ("IID", "non-IID"))], rows)


def fedacs_fashion() -> str:
    """Returns Figure 1's settings on Fashion-MNIST, tuned."""
    settings = {
        "(b) 50 samples": "50 images a client, 100 clients",
        "(a) Dirichlet 0.5": "600 images, 100 clients",
        "(b) 500 clients": "120 images, 500 clients",
    }
    file = "results/fedacs-fashion/runs"
    own = last(file, PERSONALIZED, "setting", "run")
    common = last(file, GLOBAL, "setting", "run")
    runs = [run for setting, run in own if setting == "(b) 50 samples"]
    scores = {}
    for run in runs:
        found = common if run == "FedAvg" else own
        scores[run] = [found[setting, run] for setting in settings]
    order = sorted(runs, key=lambda run: -np.mean(scores[run][0]))
    return table(["", *settings.values()], [[run, *map(spread, scores[run])] for run in order])


def fedacs_groups() -> str:
    """Returns the accuracies on planted groups, and whose models the clients used."""
    own = last("results/fedacs-groups", PERSONALIZED, "run")
    common = last("results/fedacs-groups", GLOBAL, "run")
    partners = last("results/fedacs-groups", "collaborators", "run")
    weights: dict[tuple[str, str], list[float]] = {}
    for row in published.rows("results/fedacs-groups-weights"):
        if row["round"] == "40":
            both = weights.setdefault((row["run"], row["seed"]), [0.0, 0.0])
            both[0] += float(row["weight"]) * (row["angle"] == row["partner_angle"])
            both[1] += float(row["weight"])
    rows = []
    for (run,), values in own.items():
        if run in ("FedACS, p = 0", "FedACS, p = 0.25"):
            continue
        shares = [weights[run, seed] for seed in "012" if (run, seed) in weights]
        share = ", ".join(f"{inside / whole:.2f}" for inside, whole in shares)
        number = f"{np.mean(partners[run,]):.1f}" if run.startswith("FedACS") else ""
        accuracy = spread(common[run,] if run == "FedAvg" else values)
        rows.append([run, accuracy, number, share])
    return table(["", "accuracy, %", "partners", "share, by seed"], rows)


def fedpd_seeds() -> str:
    """Returns Figure 2 with three seeds: the gaps, and communication rounds to FedAvg's."""
    gaps = lines_of("results/fedpd-seeds", "train/global/gap", "run", "seed")
    sent = lines_of("results/fedpd-seeds", "comm/uplink_bytes", "run", "seed")
    rows = []
    for run in dict.fromkeys(run for run, _ in gaps):
        ends, near = [], []
        for seed in "012":
            line = gaps[run, seed]
            skips = "p=0.5" in run or "p=0.25" in run
            ends.append(np.median(line[-75:]) if skips else line[-1])
            goal = 1.1 * gaps["FedAvg-GD", seed][-1]
            number = next(k for k, value in enumerate(line) if value <= goal)
            near.append(sent[run, seed][number] / sent["FedAvg-GD", seed][0])
        gap = ", ".join(f"{value:.1e}" for value in ends)
        kind = "median of the last 75 rounds" if skips else "last round"
        rows.append([f"{run}, {kind}", gap, ", ".join(f"{value:.0f}" for value in near)])
    return table(["seeds 0, 1, 2", "gap", "near FedAvg-GD"], rows)


def agreement() -> str:
    """Returns how many rows of each project agree, and which methods differ."""
    projects: dict[str, list[dict[str, str]]] = {}
    for row in published.rows("agreement"):
        projects.setdefault(row["project"], []).append(row)
    rows = []
    for name, own in projects.items():
        version = own[0]["release"] or f"`{own[0]['version'][:8]}`"
        agree = [row["method"] for row in own if row["what they compute"] == "agrees"]
        apart = [row["method"] for row in own if row["what they compute"] != "agrees"]
        known = {method.partition(",")[0] for method in agree}
        differ = []
        for method in apart:
            short = method.partition(",")[0]
            differ.append(method if short in known else short)
        differ = list(dict.fromkeys(differ))
        rows.append([f"`{name}`", version, str(len(own)), str(len(agree)), "; ".join(differ)])
    return table(["project", "version", "rows", "agree", "differs"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "agreement": agreement,
    "fedslr": fedslr,
    "fedclup": fedclup,
    "fedagg-equilibrium": fedagg_equilibrium,
    "fedagg-linear": fedagg_linear,
    "fedacs-fashion": fedacs_fashion,
    "fedacs-groups": fedacs_groups,
    "fedpd-seeds": fedpd_seeds,
}


def with_tables(page: str) -> str:
    """Returns a page with all of its marked tables made anew."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[4]}", page)


def pages() -> Iterator[Path]:
    """Yields the pages that have marked tables."""
    for path in [AGREEMENT, *sorted((DOCS / "papers").glob("*.md"))]:
        if MARKED.search(path.read_text()):
            yield path


if __name__ == "__main__":
    for path in pages():
        path.write_text(with_tables(path.read_text()))
