"""The numbers of FedCLUP's page, worked out from the data beside it."""

import re
from typing import Any

import numpy as np
import pytest

from benchmarks import papers, published
from tests.experiments.pages import RECORD, SHORT, curves, until

pytestmark = pytest.mark.cli


def test_the_numbers_of_fedclup_are_those_of_its_data():
    page = (RECORD / "fedclup.md").read_text()

    noise = curves(
        "results/fedclup-noise", "train/global/optimization_error", "batch_size", "num_clients"
    )
    mean = {tuple(map(int, key)): np.square(line[30:]).mean() for key, line in noise.items()}
    for points in ([(b, (b, 16)) for b in (1, 4, 16)], [(m, (4, m)) for m in (4, 16, 64)]):
        values = [mean[key] for _, key in points]
        assert f"| error | {' | '.join(f'{v:.1e}' for v in values)} |" in page
        slope = np.polyfit(np.log([x for x, _ in points]), np.log(values), 1)[0]
        assert f"Slope on log scales: {slope:.2f}." in page

    loss = curves("results/fedclup-figure2-synthetic", "train/loss", "run", "local_epochs", "seed")
    for run in ("FedCLUP, high", "FedCLUP, low"):
        lines = {k: [loss[run, k, s] for s in "01234"] for k in ("25", "50", "100", "150")}
        for number in (5, 20):
            means = [np.mean([line[number - 1] for line in own]) for own in lines.values()]
            assert f"round {number} | {' | '.join(f'{m:.4f}' for m in means)} |" in page
        goals = [line[-1] for line in lines["25"]]
        cells = [
            ", ".join(str(until(*pair)) for pair in zip(own, goals, strict=True))
            for own in list(lines.values())[1:]
        ]
        assert f"| 20 | {' | '.join(cells)} |".replace("inf", "–") in page
        falls = np.subtract(goals, [line[-1] for line in lines["150"]])
        ends = {"FedCLUP, high": ["0.0015", "0.0085"], "FedCLUP, low": ["-0.0002", "0.0006"]}
        assert [f"{fall:.4f}" for fall in (falls.min(), falls.max())] == ends[run]

    loss = curves("results/fedclup-figure5-classes", "train/loss", "setting", "run", "seed")
    runs = ("LocalTrain", *(f"FedCLUP, {k}" for k in ("high", "medium", "low")), "GlobalTrain")
    for classes in ("2 classes", "6 classes", "10 classes"):
        cells, speeds = [], []
        for run in runs:
            lines = [loss[f"Logit, {classes}", run, seed] for seed in "01234"]
            rounds = [until(line, 0.1 * line[0] + 0.9 * line[-1]) for line in lines]
            speeds.append(rounds)
            cells.append(f"{np.mean([line[-1] for line in lines]):.3f}; {np.median(rounds):.0f}")
        assert f"| {classes} | {' | '.join(cells)} |" in page
        assert (np.diff(speeds[1:4], axis=0) > 0).all()  # with λ, in every seed

    drift = curves("results/fedclup-drift", "train/personalized/optimization_error", "run", "seed")
    names = (*(f"five steps of {rate}" for rate in (2, 1, 0.5, 0.25)), "one step of 2")
    ends = [np.exp(np.mean([np.log(drift[name, seed][-1]) for seed in "012"])) for name in names]
    assert f"| distance after 400 rounds | {' | '.join(f'{end:.1e}' for end in ends)} |" in page
    assert f"from 0.5 to 0.25 is {np.log2(ends[2] / ends[3]):.2f}" in page

    keys = ("run", "heterogeneity", "seed")
    errors = curves("results/fedclup-adaptive", "train/personalized/total_error", *keys)
    penalties = curves("results/fedclup-adaptive", "penalty", *keys)
    fixed = [f"FedCLUP λ={penalty}" for penalty in (0.02, 0.1, 0.5)]
    found = [f"λ of Corollary 1, ρ = {noise}" for noise in (1, 2, 5, 10)]
    for radius, quotient in (("0.1", "1 % less"), ("0.5", "11 % more"), ("2", "23 % less")):
        ends = {}
        for run in (*fixed, "LocalTrain", "GlobalTrain (FedAvg)", *found):
            ends[run] = np.array([errors[run, radius, seed][49] for seed in "01234"])
        cells = [f"{values.mean():.3f}" for values in ends.values()]
        for place, run in enumerate(found, 5):
            mean = np.mean([penalties[run, radius, seed][49] for seed in "01234"])
            cells[place] += f" ({mean:.3g})"
        assert f"| {radius} | {' | '.join(cells)} |" in page
        assert all((ends[found[0]] < ends[run]).all() for run in found[1:])
        change = 100 * (ends[found[0]].mean() / min(ends[run].mean() for run in fixed) - 1)
        assert f"{abs(change):.0f} % {'more' if change > 0 else 'less'}" == quotient
        assert quotient in page

    keys = ("samples_per_client", "num_clients", "heterogeneity")
    errors = curves(
        "results/fedclup-corollary1", "train/personalized/statistical_error", *keys, "run"
    )
    points: dict[Any, dict[str, float]] = {}
    for (*point, run), seeds in errors.items():
        points.setdefault(tuple(map(float, point)), {})[run] = np.square(seeds).mean()
    for (n, m, r), found in points.items():
        theirs = found.pop("Corollary 1's λ")
        best = min(found, key=lambda run: found[run])
        rate, least = 1 / (m * n) + min(r**2, 1 / n), found[best]
        numbers = f"{least:.3f} | {least / rate:.1f} | {theirs / least:.2f}"
        row = f"| {n:g} | {m:g} | {r:g} | {best} | {numbers} | {n * found['LocalTrain']:.0f} |"
        assert row in page

    keys = ("run", "heterogeneity", "λ")
    errors = curves("results/fedclup-theorem1", "train/personalized/statistical_error", *keys)
    mean = {place: np.square(seeds).mean() for place, seeds in errors.items()}
    grid = sorted((penalty for run, r, penalty in mean if run == "FedCLUP" and r == "1"), key=float)
    near, below = [], []
    for radius in ("0.03", "0.1", "0.3", "1", "3"):
        line = [mean["FedCLUP", radius, penalty] for penalty in grid]
        two = [mean[run, radius, "10"] for run in ("LocalTrain", "GlobalTrain")]
        best, prior = int(np.argmin(line)), 10 / (100 * float(radius) ** 2)  # d/(nR²)
        shown = [line[grid.index(p)] for p in ("0.0001", "0.01", "0.1", "1", "10", "100", "10000")]
        row = " | ".join(f"{value:.4f}" for value in (two[0], *shown, two[1]))
        assert f"| {radius} | {row} | {grid[best]}: {line[best]:.4f} | {prior:.3g} |" in page
        assert (np.diff(line[: best + 1]) < 0).all() and (np.diff(line[best:]) > 0).all()
        nearest = min(range(14), key=lambda k: abs(np.log(float(grid[k]) / prior)))
        assert nearest - best == (radius == "0.03")
        near.append(abs(np.divide((line[0], line[-1]), two) - 1))
        below.append(1 - line[best] / np.array(two))
    local, common = 100 * np.max(near, axis=0)
    assert f"Within {local:.1f} and {common:.2f} %." in page
    (low, least), (high, most) = 100 * np.min(below, axis=0), 100 * np.max(below, axis=0)
    assert f"By {low:.0f} to {high:.0f} % and by {least:.1f} to {most:.0f} %." in page

    error = "train/personalized/optimization_error"
    errors = curves("fedclup-figure7", error, "run", "condition", "seed")
    for penalty in (0.02, 0.1, 0.5):  # L = 1, μ = 1/κ
        cells = []
        for kappa in (2, 8, 64):
            factor = 1 - (penalty + 1) / (4 * kappa * (penalty + 1 / kappa))
            lines = [errors[f"FedCLUP λ={penalty}", str(kappa), seed] for seed in "012"]
            assert all((np.divide(e[1:], e[:-1]) ** 2 < factor).all() for e in lines)
            falls = [2 * np.log(e[-1] / e[0]) for e in lines]
            lengths = [len(e) for e in lines]
            mean = np.mean([np.exp(f / (n - 1)) for f, n in zip(falls, lengths, strict=True)])
            bound, rounds = 1 + np.mean(falls) / np.log(factor), np.mean(lengths)
            cells.append(f"{factor:.3f}, {mean:.3f}; {bound:.0f}, {rounds:.1f}")
        assert f"| λ = {penalty} | {' | '.join(cells)} |" in page

    errors = curves("results/fedclup-table1", error, "λ", "run", "seed")
    counts = curves("results/fedclup-table1", "train/samples", "λ", "run", "seed")

    def spread(values, form):
        ends = dict.fromkeys(form.format(value) for value in (min(values), max(values)))
        return " to ".join(ends)

    arrived = {}
    for run in dict.fromkeys(run for _, run, _ in errors):
        cells = []
        for penalty in ("0.02", "0.1", "0.5"):
            places = [(penalty, run, seed) for seed in "012"]
            rounds = [until(errors[place], 0.01) for place in places]
            pairs = [pair for pair in zip(places, rounds, strict=True) if pair[1] < np.inf]
            spent = [counts[place][k - 1] / 500 for place, k in pairs]
            cell = ", ".join(map(str, rounds)).replace("inf", "–") if spent else "–"
            cell += f"; {spread(spent, '{:,.0f}')}" if spent else ""
            cells.append(f"{cell} ({spread([errors[place][-1] for place in places], '{:.1e}')})")
            arrived[run, penalty] = rounds
        assert f"| {run} | {' | '.join(cells)} |" in page
    for penalty in ("0.02", "0.1", "0.5"):
        best = np.min([r for (run, p), r in arrived.items() if "L2GD" in run and p == penalty], 0)
        assert (best > arrived["FedCLUP", penalty]).all()
        assert f"{', '.join(f'{k:.0f}' for k in best)} at λ = {penalty}" in page
    far = [line[-1] for (_, run, _), line in errors.items() if run == "pFedMe, five steps"]
    assert f"stops {min(far) / 0.01:.0f} to {max(far) / 0.01:.0f} times as far away" in page
    left = [(1 - (x + 0.1) / (x + 1)) ** 30 for x in (0.02, 0.1, 0.5)]
    assert "{:.1e}, {:.1e} and {:.1e} for the three λ".format(*left) in page

    keys = ("heterogeneity", "run", "seed")
    for name, label in (("results/fedclup-rounds", "10 steps, "), ("fedclup-figure1", "")):
        totals = curves(name, "train/personalized/total_error", *keys)
        for radius in ("0.1", "0.5", "2"):
            alone = np.zeros((3, 3))
            for seed in range(3):
                lines = [totals[radius, f"FedCLUP λ={k}", str(seed)] for k in (0.02, 0.1, 0.5)]
                low, high = min(map(min, lines)), max(line[0] for line in lines)
                for target in low + (high - low) * np.arange(1000) / 1000:
                    first = np.array([until(line, target) for line in lines])
                    if (first == first.min()).sum() == 1:
                        alone[first.argmin(), seed] += 0.1
            cells = [", ".join(f"{share:.0f}" for share in row) + " %" for row in alone]
            assert f"| {label}R = {radius} | {' | '.join(cells)} |" in page
    runs = [f"FedCLUP λ={k}" for k in (0.02, 0.1, 0.5)] + ["GlobalTrain (FedAvg)", "LocalTrain"]
    for radius, words in (
        ("0.1", {2: "first at 5, 37 and 28 %", 3: "at 23, 18 and 34 %"}),
        ("2", {4: "first at 52, 62 and 72 %"}),
    ):
        by_seed = [papers.first([totals[radius, run, seed] for run in runs]) for seed in "012"]
        for place, text in words.items():
            shares = [f"{round(alone[place])}" for alone in by_seed]
            assert re.findall(r"\d+", text) == shares and text in page
    for radius, run, words in (
        ("0.1", "FedCLUP λ=0.02", "0.494 in round 1 to 0.634"),
        ("0.1", "LocalTrain", "0.509 to 0.920"),
        ("2", "FedCLUP λ=0.02", "5.042 to 4.465"),
    ):
        ends = np.mean([totals[radius, run, seed] for seed in "012"], axis=0)[[0, -1]]
        assert [f"{end:.3f}" for end in ends] == re.findall(r"\d\.\d{3}", words)
        assert words in page

    names = ("total_error", "optimization_error")
    lasts = [
        curves("fedclup-figure6", f"train/personalized/{name}", "run", "clients") for name in names
    ]
    numbers = curves("fedclup-figure6", "round", "run", "clients")
    for name, last in zip(names, lasts, strict=True):
        for clients, label in (("100", "100 clients"), ("1000", "1,000 clients")):
            lines = [last[f"FedCLUP λ={k}", clients] for k in (0.02, 0.25, 0.5)]
            cells = [f"{line[-1]:.3f}" for line in lines]
            if name == "total_error":
                cells[0] = f"**{cells[0]}**"
                assert (np.diff(np.array(lines)[:, ~np.isnan(lines[0])], axis=0) > 0).all()
            else:
                late = [k > 50 for k in numbers["FedCLUP λ=0.5", clients]]
                floor = np.nanmean([np.array(line)[late] for line in lines[1:]])
                assert f"{floor:.2f} with {'10' if clients == '100' else '100'}" in page
            assert f"| {name.replace('_', ' ')}, {label} | {' | '.join(cells)} |" in page

    keys = ("heterogeneity", "run", "seed")
    errors = curves("results/fedclup-figure6", "train/personalized/total_error", *keys)
    for radius, best in (("0.1", 2), ("0.5", 0), ("2", 0)):
        lines = np.array(
            [
                [errors[radius, f"FedCLUP λ={k}", seed] for seed in "01234"]
                for k in (0.02, 0.25, 0.5)
            ]
        )
        first = lines.argmin(0)
        assert first.shape == (5, 20) and (first[:, -1] == best).all()
        assert np.bincount(first.flat, minlength=3)[best] == (84 if radius == "0.1" else 100)
        mean, spread = lines[..., -1].mean(1), lines[..., -1].std(1, ddof=1)
        cells = [f"{m:.3f} ± {s:.3f}" for m, s in zip(mean, spread, strict=True)]
        cells[best] = f"**{cells[best]}**"
        assert f"| R = {radius} | {' | '.join(cells)} |" in page


def rows_of_table_4(data, title, printed, printed_together):
    """A section of the record, and the accuracies in % that its two rows have from the data.

    They are those of the personalized models by run, of the global models, and GlobalTrain's.
    """
    page = (RECORD / "fedclup.md").read_text()
    section = page[page.index(title) :]
    rows = {row["run"]: row for row in published.rows(data)}
    assert rows.keys() == {*printed, "GlobalTrain"}
    own = {run: 100 * float(rows[run]["test/personalized/accuracy"]) for run in printed}
    cells = [f"{own[run]:.2f} ({printed[run]:.2f})" for run in printed]
    assert f"| personalized models | {' | '.join(cells)} |  |" in section
    shared = [100 * float(rows[run]["test/global/accuracy"]) for run in list(printed)[1:]]
    together = 100 * float(rows["GlobalTrain"]["test/global/accuracy"])
    cells = [*(f"{accuracy:.2f}" for accuracy in shared), f"{together:.2f} ({printed_together})"]
    assert f"| global model |  | {' | '.join(cells)} |" in section
    assert sorted(own.values()) == list(own.values())
    assert own["FedCLUP, low"] < together  # each run lies between both ends, and nearer with λ
    return section, own, shared, together


def test_the_row_of_emnist():
    printed = {"LocalTrain": 61.11}
    printed |= {"FedCLUP, high": 62.78, "FedCLUP, medium": 64.15, "FedCLUP, low": 66.72}
    title = "## Tables 2 and 4 on EMNIST"
    page, own, _, together = rows_of_table_4("results/fedclup-emnist", title, printed, 66.11)
    assert f"| {66.11 - together:.2f} points below. | yes |" in page
    behind = [f"{printed[run] - own[run]:.2f}" for run in printed]
    assert f"{behind[0]} points." in page
    assert f"{behind[1]}, {behind[2]} and {behind[3]} points below" in page
    runs = list(printed)[1:]
    gains = [own[run] - own["LocalTrain"] for run in runs]
    assert f"{gains[0]:.0f} to {gains[-1]:.0f} points" in page
    theirs = [printed[run] - printed["LocalTrain"] for run in runs]
    assert f"({theirs[0]:.1f} to {theirs[-1]:.1f})" in page


def test_the_row_of_cifar():
    printed = {"LocalTrain": 62.38}
    printed |= {"FedCLUP, high": 61.02, "FedCLUP, medium": 67.12, "FedCLUP, low": 73.02}
    title = "## Tables 2 and 4 on CIFAR-10"
    page, own, shared, together = rows_of_table_4("results/fedclup-cifar", title, printed, 80.41)
    behind = [printed[run] - own[run] for run in printed]
    behind.append(80.41 - together)
    assert min(behind[0], behind[-1]) > 10 and together <= 60
    assert f"{behind[0]:.2f} and {behind[-1]:.2f} points; FedCLUP by" in page
    assert f"{behind[1]:.2f}, {behind[2]:.2f} and {behind[3]:.2f}." in page
    assert max(shared) < together
    assert printed["FedCLUP, high"] < printed["LocalTrain"]
    words = f"CIFAR-10 {min(behind):.0f} to {max(behind):.0f} points below print"
    assert words in (SHORT / "fedclup.md").read_text()


def test_images_that_local_train_needs_on_emnist():
    page = (RECORD / "fedclup.md").read_text()
    rows = published.rows("results/fedclup-alone")
    own = {row["images"]: 100 * float(row["test/personalized/accuracy"]) for row in rows}
    alone, *_ = published.rows("results/fedclup-emnist")
    own["200"] = 100 * float(alone["test/personalized/accuracy"])
    cells = [own[images] for images in ("200", "400", "1000", "200, lr = 0.1")]
    assert f"| LocalTrain | {' | '.join(f'{cell:.2f}' for cell in cells)} |" in page
    assert 44 <= own["400"] <= 52 and 54 <= own["1000"] <= 61
    assert f"| {own['400']:.2f}, {own['1000']:.2f}. | yes |" in page
    assert f"{cells[3] - cells[0]:.2f} points above." in page
    by_doubling = (own["1000"] - own["400"]) / np.log2(1000 / 400)
    assert f"At {by_doubling:.1f} points for twice the images" in page
    needed = 1000 * 2 ** ((61.11 - own["1000"]) / by_doubling)
    assert f"about {round(needed, -2):,.0f} images" in page
