"""The papers' pages: their figures, and their numbers, worked out from the data beside them."""

import re
from typing import Any

import numpy as np
import pytest

from datamodules import FashionMNISTDataModule, LeastSquares
from pfl.experiments import Reproduction
from tests.commands import ROOT, table
from tests.experiments.test_reproduce import ALL, drawn

pytestmark = pytest.mark.cli

PAPERS = ROOT / "docs" / "papers"
# The figures that have a page with results.
FIGURES = [figure.name for figure in ALL if figure.panels and all(map(drawn, figure.jobs()))]
PAGES = [PAPERS / f"{paper}.md" for paper in ("fedpd", "fedclup")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_show_every_figure_and_its_data(page):
    links = re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]
    names = [name for name in FIGURES if name.startswith(page.stem)]
    for file in (f"{name}.{kind}" for name in names for kind in ("png", "csv")):
        assert any(link.endswith(file) for link in links), file
    for name in names:
        assert name in page.read_text()


def curves(name, value, *keys):
    """The values of a column of published data by round, for each place that `keys` tell apart."""
    lines: dict[Any, list[float]] = {}
    for row in table(ROOT / "docs" / "data" / f"{name}.csv"):
        lines.setdefault(tuple(row[key] for key in keys), []).append(float(row[value] or "nan"))
    return lines


def until(line, target):
    """The first round, from 1, whose value is at most the target; infinity if there is none."""
    return next((k for k, value in enumerate(line, 1) if value <= target), np.inf)


def constant_c2(eta, smooth):
    """C₂ of FedPD's theorems in the journal, with the least values that its appendix allows."""
    step = smooth * eta
    c6 = 3 * max(((1 + step) / eta) ** 2, (1 + 2 * eta) ** 2, step**2)
    rates = (1 - 2 * step - 4 * step**2) / (2 * eta), 1 / (2 * eta), (1 + 8 * step) / (2 * smooth)
    return 8 * smooth**2 * c6 / min(rates)


def skipping_bound(p, eta):
    """C(p) of Theorem 3 there for L = 1 and N = 10."""
    c3 = (p * (1 + eta) + eta) / (1 - eta)
    squares = p * (1 - c3 ** (1 / (1 - p))) * (1 + eta) * (2 * eta + p * (3 + eta))
    squares /= 1 - 2 * eta - p * (1 + eta)
    return eta**2 * (1 - p) * 0.9 * 8 * constant_c2(eta, 1) * squares**2


def test_the_numbers_of_fedpd_are_those_of_its_data():
    page = (PAPERS / "fedpd.md").read_text()

    labels = {"FedPD-GD, p=0": "FedPD-GD p=0, text", "FedPD-VR": "FedPD-VR, text"}
    labels |= {
        "FedPD-GD, p=0, η=0.5": "FedPD-GD p=0, theory",
        "FedPD-VR, η=0.2": "FedPD-VR, η = 0.2",
    }
    gaps = [curves(f"fedpd-figure{k}", "train/global/gap", "run") for k in (4, 5)]
    for run, label in labels.items():
        rounds = [[until(gap[run,], 10.0**-k) for gap in gaps] for k in range(6, 11)]
        cells = [", ".join(map(str, pair)).replace("inf", "–") for pair in rounds]
        assert f"| {label} | {' | '.join(cells)} |" in page
    kinds = ((0.04, "FedPD-GD, p=0", "text"), (0.5, "FedPD-GD, p=0, η=0.5", "theory"))
    sums = [[sum(gap[run,]) for gap in gaps] for _, run, _ in kinds]
    words = [
        "{:.1e} and {:.1e} with the {}'s".format(*s, k[2]) for s, k in zip(sums, kinds, strict=True)
    ]
    bounds = [constant_c2(eta, 0.59) * np.log(2) for eta, *_ in kinds]
    assert words[0] + " steps, " + words[1] in page
    assert f"is at most {bounds[0]:.0f} and {bounds[1]:.0f}" in page

    gaps = curves("results/fedpd-further", "train/global/gap", "run", "non_iid")
    for run in {run for run, _ in gaps}:
        lines = [gaps[run, kind] for kind in ("weak", "strong")]
        rounds = ", ".join(str(until(line, 1e-8)) for line in lines).replace("inf", "–")
        ends = f"{lines[0][-1]:.1e}, {lines[1][-1]:.1e} after {len(lines[0])}"
        assert f"| {run} | {ends} | {rounds} |" in page
        assert all((np.diff(line) < 0).all() for line in lines)

    gaps = curves(
        "results/fedpd-floor", "train/global/gap", "heterogeneity", "skip_probability", "step"
    )
    floor = {tuple(map(float, key)): np.median(gap[100:]) for key, gap in gaps.items()}
    by_r = {r: floor[r, 0.5, 0.3] for r in (0, 0.1, 1, 10)}
    by_p = {p: floor[1, p, 0.3] for p in (0, 0.1, 0.25, 0.5, 0.75)}
    slopes = []
    for line in (by_r, by_p):
        assert f"| floor | {' | '.join(f'{f:.1e}' for f in line.values())} |" in page
        x, y = (np.log(list(values)[1:]) for values in (line, line.values()))
        slopes.append(np.polyfit(x, y, 1)[0])
    assert f"Slope of log floor on log R: {slopes[0]:.2f}." in page
    assert f"the slope {slopes[1]:.2f} of log floor on log p" in page
    inputs, targets = LeastSquares(noise=0.0, seed=0).train_arrays()
    x = np.linalg.lstsq(np.concatenate(inputs), np.concatenate(targets))[0]
    gradients = np.einsum("mnd,mn->md", inputs, inputs @ x - targets) / 50
    bounds = [skipping_bound(p, 0.3) * np.square(gradients).sum(1).max() for p in by_p]
    row = " | ".join(f"{b:.1e}" if b else "0" for b in bounds)
    assert f"| C(p)G² of Theorem 3 in the journal | {row} |" in page
    ratios = np.divide(bounds[1:], list(by_p.values())[1:])
    assert f"it is {ratios.min():.0e} to {ratios.max():.0e} times the floor" in page
    eta = (5**0.5 - 1) / 8
    for p in (0.01, 0.59):
        assert f"{skipping_bound(p, eta) / (eta * p) ** 2:,.0f} times" in page
    cells = [
        [f"{max(x for x, f in line.items() if f <= 10.0**-k):g}" for k in (6, 5, 4, 3, 2)]
        for line in (by_p, by_r)
    ]
    assert f"| largest p at R = 1, of the five | {' | '.join(cells[0])} |" in page
    assert f"| largest R at p = 0.5, of the four | {' | '.join(cells[1])} |" in page
    for key in (("0", "0.5", "0.3"), ("1", "0", "0.3")):
        assert (np.diff(gaps[key]) < 0).all() and gaps[key][-1] < 1e-16

    gaps = curves("results/fedpd-floor-eta", "train/global/gap", "step", "seed")
    logs = {
        eta: [
            np.mean([np.log(np.median(gaps[eta, s][a:b])) for s in "012"])
            for a, b in ((300, 500), (300, 400), (400, 500))
        ]
        for eta in ("0.025", "0.05", "0.1", "0.2", "0.3")
    }
    assert f"the factor is {np.exp(np.ptp(logs.pop('0.025')[1:])):.1f}" in page
    assert all(np.ptp(halves[1:]) < np.log(2) for halves in logs.values())
    floors = [whole for whole, *_ in logs.values()]
    row = " | ".join(f"{f:.1e}" for f in np.exp(floors))
    assert f"| floor | {row} |" in page
    eta = np.array([*map(float, logs)])
    slope, other = (
        np.polyfit(np.log(x), floors[: len(x)], 1)[0] for x in (eta[:3], eta / (1 + eta))
    )
    assert f"log floor on log η: {slope:.2f}, just outside" in page
    assert f"it is {other:.2f} over all four" in page

    gaps = curves("results/fedpd-chain", "train/global/gap", "local_steps", "run")
    for steps in ("10", "100"):
        lines = [gaps[key] for key in gaps if key[0] == steps]
        row = " | ".join(str(until(line, 1.59)) for line in lines)
        assert f"| {steps} local steps | {row} |" in page
        assert min(min(line[:11]) for line in lines) > 19


def test_the_numbers_of_fedpds_figures_are_those_of_their_data():
    page = (PAPERS / "fedpd.md").read_text()
    kinds = ("weak", "strong")
    gaps = curves("fedpd-figure2", "train/global/gap", "run", "non_iid")
    sent = curves("fedpd-figure2", "comm/uplink_bytes", "run", "non_iid")

    def short(value):
        return f"{value:.1e}".replace("e-0", "e-")

    def level(run, last):  # the median gap of the last rounds, on both data sets
        return [short(np.median(gaps[run, kind][-last:])) for kind in kinds]

    ends = {
        "FedAvg-GD, rate 0.04, round 150": ("FedAvg-GD", ", no longer falling"),
        "FedProx, ρ = 1, round 150": ("FedProx", ", no longer falling"),
        "FedPD-GD p=0, text, round 400": ("FedPD-GD, p=0", ", falling"),
        "FedPD-GD p=0, theory, round 100": ("FedPD-GD, p=0, η=0.5", ", falling"),
        "FedPD-VR, text, round 400": ("FedPD-VR", ", falling"),
        "FedPD-VR, η = 0.2, round 150": ("FedPD-VR, η=0.2", ", falling"),
    }
    for label, (run, words) in ends.items():
        assert f"| {label} | {' | '.join(cell + words for cell in level(run, 1))} |" in page
        for kind in kinds:
            fallen = gaps[run, kind][-1] / gaps[run, kind][-21]
            assert (fallen > 0.99) == ("no longer" in words)
    for label, run, last in (
        ("code, median of the last 150 rounds", "FedPD-GD, p=0.5, η=0.08", 150),
        ("theory, median of the last 75 rounds", "FedPD-GD, p=0.5, η=0.5", 75),
    ):
        assert f"| FedPD-GD p=0.5, {label} | {' | '.join(level(run, last))} |" in page
    cells = zip(level("FedAvg-SGD", 15), level("FedPD-SGD, η=0.5", 15), strict=True)
    row = " | ".join(map(", ".join, cells))
    assert f"(theory), median of the last 15 of 30 rounds | {row} |" in page
    spreads = [
        f"{np.std(np.log10(gaps[run, kind][-20:])):.2f}"
        for run in ("FedPD-SGD, η=0.5", "FedAvg-SGD")
        for kind in kinds
    ]
    text = "{} (weakly) and {} (strongly) with FedPD-SGD, {} and {} with FedAvg-SGD"
    assert text.format(*spreads) in page
    floors = [
        level(f"FedPD-GD, p=0.5{eta}", n)[0] for eta, n in ((", η=0.5", 75), (", η=0.08", 150))
    ]
    text = "{} with η = 0.5, {} with 0.08, and at 0.04\nstill falling after 400 rounds, at {}"
    assert text.format(*floors, level("FedPD-GD, p=0.5", 1)[0]) in page

    def communications(run, targets):
        lines = (gaps[run, kind] for kind in kinds)
        rounds = map(until, lines, targets)
        return [sent[run, k][int(r) - 1] / 16000 for k, r in zip(kinds, rounds, strict=True)]

    floor = [1.1 * gaps["FedAvg-GD", kind][-1] for kind in kinds]
    pairs = [
        [communications(run, goals) for run in runs]
        for goals, *runs in (
            (floor, "FedPD-GD, p=0.5, η=0.5", "FedAvg-GD"),
            ((1e-8, 1e-7), "FedPD-GD, p=0.5, η=0.08", "FedAvg-GD, lr=0.005"),
            (floor, "FedPD-GD, p=0.5", "FedAvg-GD"),
        )
    ]
    numbers = [f"{count:.0f}" for pair in pairs for count in np.transpose(pair).flat]
    text = (
        "theory: {} communication rounds against {} (weakly), {} against {} (strongly). "
        "Code, to 1e-8 and 1e-7: {} against {}, {} against {}. Text: {} against {}, {} against {}."
    )
    assert text.format(*numbers) in page

    rows = {
        "FedAvg-GD": "FedAvg-GD",
        "FedProx": "FedProx",
        "FedPD-GD p=0, text": "FedPD-GD, p=0",
        "FedPD-VR, text": "FedPD-VR",
        "FedPD-GD p=0, theory": "FedPD-GD, p=0, η=0.5",
        "FedPD-GD p=0.5, theory": "FedPD-GD, p=0.5, η=0.5",
        "FedPD-VR, η = 0.2": "FedPD-VR, η=0.2",
    }
    both = [
        [curves(f"fedpd-figure{k}", name, "run") for name in ("train/global/gap", "train/samples")]
        for k in (4, 5)
    ]
    for label, run in rows.items():
        cells = []
        for gap, samples in both:
            rounds = until(gap[run,], 1e-8)
            if rounds == np.inf:
                cells += ["never", ""]
                continue
            passes = samples[run,][int(rounds) - 1] / 40000
            cells += [f"{rounds}", f"{passes:.1f}" if passes < 20 else f"{passes:,.0f}"]
        row = " | ".join(cells).replace(".0 ", " ")
        assert f"| {label} | {row} |".replace("|  |", "| |") in page
    whole, half = (np.array(both[0][0][run,][:300]) for run in ("FedPD-GD, p=0", "FedPD-GD, p=0.5"))
    assert abs(half / whole - 1).max() < 0.1


def test_the_numbers_of_fedpds_further_runs_are_those_of_its_data():
    page = (PAPERS / "fedpd.md").read_text()

    gaps = curves("results/fedpd-seeds", "train/global/gap", "run", "seed")
    sent = curves("results/fedpd-seeds", "comm/uplink_bytes", "run", "seed")
    goals = {seed: 1.1 * gaps["FedAvg-GD", seed][-1] for seed in "012"}
    medians = {}
    for run in dict.fromkeys(run for run, _ in gaps):
        name, last = run.removesuffix(", η=0.5"), run.endswith(("GD", "FedProx", "p=0, η=0.5"))
        lines = {seed: gaps[run, seed] for seed in "012"}
        ends = [line[-1] if last else np.median(line[-75:]) for line in lines.values()]
        near = [sent[run, s][int(until(line, goals[s])) - 1] / 16000 for s, line in lines.items()]
        what = "last round" if last else "median of the last 75 rounds"
        cells = [", ".join(f"{x:.1e}" for x in ends), ", ".join(f"{x:.0f}" for x in near)]
        assert f"| {name}, {what} | {' | '.join(cells)} |" in page
        if run in ("FedAvg-GD", "FedProx"):
            assert all(abs(line[149] / line[99] - 1) < 1e-3 for line in lines.values())
        medians[name] = np.array(ends)
    half, quarter = medians["FedPD-GD, p=0.5"], medians["FedPD-GD, p=0.25"]
    low, high = min(half / quarter), max(half / quarter)
    assert f"| {low:.1f} to {high:.0f} times. | yes |" in page
    above = half / medians["FedAvg-GD"]
    assert f"is {min(above):.1f} to {max(above):.1f} times FedAvg-GD's last gap" in page
    few = [sum(x <= goals[s] for x in gaps["FedPD-GD, p=0.5, η=0.5", s]) for s in "012"]
    assert "in {}, {} and {} of 150".format(*few) in page

    gaps = curves("results/fedpd-sgd", "train/global/gap", "run", "non_iid", "seed")
    larger, higher = [], []
    for run in ("FedAvg-SGD", "FedPD-SGD, η=0.5"):
        lines = np.array([[gaps[run, kind, s] for s in "012"] for kind in ("weak", "strong")])
        spreads, levels = np.log10(lines[..., -20:]).std(-1), np.median(lines[..., -15:], -1)
        cells = [", ".join(f"{x:.2f}" for x in row) for row in spreads]
        cells += [", ".join(f"{x:.1e}" for x in row) for row in levels]
        assert f"| {run.removesuffix(', η=0.5')} | {' | '.join(cells)} |" in page
        larger += list(spreads[1] / spreads[0])
        higher += list(levels[1] / levels[0])
    assert f"| {min(larger):.1f} to {max(larger):.1f} times. | yes |" in page
    assert f"| At most {max(higher):.1f} times. | yes |" in page

    gaps = curves("results/fedpd-falling", "train/global/gap", "run", "seed")
    sent = curves("results/fedpd-falling", "comm/uplink_bytes", "run", "seed")
    parts = []
    for run in ("FedPD-GD, p=1-r/T, T=150", "FedPD-GD, p=1-r/T, T=600"):
        last = [gaps[run, seed][-1] for seed in "012"]
        cells = [", ".join(f"{x:.1e}" for x in last)]
        cells.append(", ".join(f"{sent[run, seed][-1] / 16000:.0f}" for seed in "012"))
        assert f"| {run} | {' | '.join(cells)} |" in page
        parts += list(last / half)
    assert f"At most {max(parts):.3f} times" in page
    assert max(gaps["FedPD-GD, p=0, η=0.5", seed][49] for seed in "012") < 1e-11

    gaps = curves("results/fedpd-eta", "train/global/gap", "run", "step")
    ends = {place: line[-1] for place, line in gaps.items()}
    steps = ("5/N", "2/N", "1/N", "0.1/N", "0.01/N")
    for run in dict.fromkeys(run for run, _ in gaps):
        cells = [f"{ends[run, step]:.1e}" for step in steps]
        assert f"| {run} | {' | '.join(cells)} |" in page
    small = [line for (_, step), line in gaps.items() if step in steps[3:]]
    assert all((np.diff(line) < 0).all() for line in small)
    assert f"All gaps still fall, the smallest is {min(line[-1] for line in small):.1e}." in page
    behind = {step: ends["FedPD-GD, p=0", step] / ends["FedAvg-GD", step] for step in steps}
    assert f"are {behind['0.1/N']:.1f} and {behind['0.01/N']:.1f} times FedAvg-GD's" in page
    line = gaps["FedPD-GD, p=0", "2/N"]
    more = 100 * np.log(behind["2/N"]) / np.log(line[-101] / line[-1])
    assert f"its gap is {behind['2/N']:.0f} times FedAvg-GD's" in page
    assert f"it would take {more:.0f} more" in page
    apart = [ends["FedPD-VR", step] / ends["FedPD-GD, p=0", step] - 1 for step in steps]
    assert f"| Within {100 * max(map(abs, apart)):.1f} %. | yes |" in page
    runs = [run for run, step in ends if step == "5/N"]
    first = [min(runs, key=lambda run, step=step: ends[run, step]) for step in steps]
    assert first[0] == "FedPD-GD, p=0" and {*first[1:]} <= {"FedAvg-GD", "FedProx"}

    keys = ("condition", "skip_probability", "seed")
    gaps = curves("results/fedpd-curvature", "train/global/gap", *keys)
    kappas = [*dict.fromkeys(kappa for kappa, *_ in gaps)]
    logs = [np.mean([np.log(np.median(gaps[k, "0.5", s][200:])) for s in "012"]) for k in kappas]
    row = " | ".join(f"{floor:.1e}" for floor in np.exp(logs))
    assert f"| κ | {' | '.join(kappas)} |" in page and f"| floor | {row} |" in page
    apart = [np.log(1 - 1 / float(k)) for k in kappas[1:5]]
    assert f"up to κ = 1.5. | {np.polyfit(apart, logs[1:5], 1)[0]:.2f}. | yes |" in page
    pairs = [(gaps["1", "0.5", s], gaps["1", "0", s]) for s in "012"]
    most = [
        max(abs(x / y - 1) for pair in pairs for x, y in zip(*pair, strict=True) if y > least)
        for least in (1e-20, 1e-18)
    ]
    assert "Within {:.1e}; above 1e-18 within {:.1e}".format(*most) in page

    names = ("test/global/accuracy", "comm/uplink_bytes", "train/loss", "test/global/loss")
    scores, ways, *losses = (curves("results/fedpd-mnist", name, "run") for name in names)
    for (run,), line in scores.items():
        cells = [f"{ways[run,][-1] / 619040:.0f}", f"{100 * line[-1]:.1f}"]
        cells += [f"{loss[run,][-1]:.3f}" for loss in losses]
        assert f"| {run} | {' | '.join(cells)} |" in page

    names = ("test/global/accuracy", "train/samples", "comm/uplink_bytes", "round", "diverged")
    columns = [curves("results/fedpd-mnist-figure6", name, "run") for name in names]
    last, most = {}, {}
    for run in columns[0]:
        score, samples, sent, rounds, diverged = (np.array(lines[run]) for lines in columns)
        if diverged[-1]:
            assert f"| {run[0]} | diverged in round {rounds[-1]:.0f} | – | – | – | – |" in page
            continue
        cells = [f"{rounds[-1]:.0f}", f"{sent[-1] / 619040:.0f}", f"{100 * score[-1]:.1f}"]
        for goal, spent, unit in ((0.8, samples, 1), (0.9, sent, 619040)):
            k = until(-score, -goal)
            cells.append(f"{spent[int(k) - 1] / unit:,.0f}" if k < np.inf else "–")
        assert f"| {run[0]} | {' | '.join(cells)} |" in page
        last[run[0]], most[run[0]] = 100 * score[-1], 100 * np.nanmax(score)
    assert f"it reaches {most['FedPD-VR, η=1/90']:.1f} % in 100 rounds" in page
    behind = last["FedPD-SGD, p=0"] - last["FedPD-SGD, p=0.5"]
    assert f"it ends {behind:.1f} points behind" in page
    ends = [last[f"FedPD-SGD, p={p}, η=1"] for p in ("0.5", "0")]
    assert "level, {:.1f} against {:.1f} %".format(*ends) in page


def test_fedpds_floors_by_p_stand_beside_table_iii():
    page = (PAPERS / "fedpd.md").read_text()
    gaps = curves("results/fedpd-table3", "train/global/gap", "skip_probability", "seed")
    share = np.array([*dict.fromkeys(float(p) for p, _ in gaps)])
    # By p, seed and round; the last half of the rounds tells the floor.
    last = np.array([*gaps.values()]).reshape(10, 3, 800)[..., 400:]
    eta = (5**0.5 - 1) / 8
    steep = ((share * (1 + eta) + eta) / (1 - eta)) ** (2 / (1 - share))
    c = eta**2 * np.where(share < (1 - 2 * eta) / (1 + eta), 12 * share**2, 14 * steep)
    largest = []
    for seed in range(3):
        inputs, targets = LeastSquares(condition=2.0, noise=0.0, seed=seed).train_arrays()
        x = np.linalg.lstsq(np.concatenate(inputs), np.concatenate(targets))[0]
        gradients = np.einsum("mnd,mn->md", inputs, inputs @ x - targets) / 50
        largest.append(np.square(gradients).sum(1).max())
    bounds, floors = np.outer(c, largest), np.median(last, -1)
    logs = [np.log(part).mean(1) for part in (floors, last.mean(-1), bounds)]
    for name, line in zip(("floor", "mean gap", "C(p)G² of Table III"), logs, strict=True):
        assert f"| {name} | {' | '.join(f'{value:.1e}' for value in np.exp(line))} |" in page
    assert f"by factors from {(bounds / floors).min():,.0f} on" in page
    slopes = [np.polyfit(np.log(share[:4]), line[:4], 1)[0] for line in logs[:2]]
    assert f"within 2 ± 0.3. | {slopes[0]:.2f}. " in page
    assert f"The mean gap has the slope {slopes[1]:.2f}. | no; that of the mean is |" in page
    falls = [(steps := line[1:] / line[:-1])[steps < 1] for line in last[0]]
    assert f"falls to {np.mean([*map(np.median, falls)]):.2f} of itself" in page
    peaks = []
    for lines in (last[0], last[2]):  # p = 0.05 and 0.2
        rises = [np.diff(line) > 0 for line in lines]
        tops = [line[1:-1][r[:-1] & ~r[1:]] for line, r in zip(lines, rises, strict=True)]
        peaks.append(np.mean([np.log(np.median(top)) for top in tops]))
    grown = np.exp([logs[0][2] - logs[0][0], peaks[1] - peaks[0]])
    assert "it grows {:.0f} times, the median of the peaks {:.1f} times".format(*grown) in page
    ends = np.exp(logs[2][9] - logs[2][7]), np.exp(logs[0][9] - logs[0][7])
    assert f"the table's bound grows {ends[0]:.0f} times" in page
    assert f"20 times. | {ends[1]:.1f} times. | yes |" in page


def test_the_numbers_of_fedslr_are_those_of_its_data():
    page = (PAPERS / "fedslr.md").read_text()

    gaps = curves("results/fedslr-theory", "train/global/low_rank_gap", "setting")
    lines = [gaps[f"η_g = {eta}",] for eta in ("0.1", "0.5", "1", "10")]
    for k in (50, 200):
        row = " | ".join(f"{line[k - 1]:.1e}" for line in lines)
        assert f"| gap after {k} rounds | {row} |" in page
    row = " | ".join(f"{(line[49] / line[25]) ** (1 / 24):.3f}" for line in lines)
    assert f"| factor of a round, rounds 26 to 50 | {row} |" in page

    floors = [np.mean(gaps[f"B = {size}",][100:]) for size in (1, 4, 16)]
    row = " | ".join(f"{floor:.1e}" for floor in floors)
    assert f"| mean gap of the rounds 101 to 200 | {row} |" in page
    slope = np.polyfit(np.log([1, 4, 16]), np.log(floors), 1)[0]
    assert f"with the slope {slope:.2f} of log floor on log B" in page
    noise = curves("results/fedslr-noise", "train/global/low_rank_gap", "samples", "batch_size")
    found = {key: np.mean(line[40:]) for key, line in noise.items()}
    slopes = [np.log(floors[2] / floors[1]) / np.log(4)]
    for n, label in (("100", "100"), ("1000", "1,000")):
        line = [found[n, size] for size in ("4", "8", "16")]
        assert f"| {label} | {' | '.join(f'{f:.1e}' for f in line)} |" in page
        slopes.append(np.log(line[2] / line[0]) / np.log(4))
    assert f"is {slopes[1]:.2f} at\nthis rate and {slopes[0]:.2f} at 0.05" in page
    assert f"that is drawn. | {slopes[2]:.2f} | yes |" in page
    assert f"| {found['1000', '4'] / found['100', '4']:.1f} times. | just |" in page

    keys = ("low_rank_penalty", "sparse_penalty")
    ranks = curves("results/fedslr-planted", "train/global/rank", *keys)
    shares = curves("results/fedslr-planted", "train/personalized/support", *keys)
    penalties, weights = ("0.1", "0.3", "1", "2"), ("0.05", "0.15", "0.4")
    row = " | ".join(f"{ranks[k, '0.05'][-1]:g}" for k in penalties)
    assert f"| rank of w, of 12, with every μ | {row} |" in page
    assert all(ranks[k, m][-1] == ranks[k, "0.05"][-1] for k, m in ranks)
    for m in weights:
        row = " | ".join(f"{shares[k, m][-1]:.2f}" for k in penalties)
        assert f"| right share of the support of pᵢ, μ = {m} | {row} |" in page
    best = max(shares[key][-1] for key in shares if ranks[key][-1] == 2)
    assert f"where the rank is 2 the share is at most {best:.2f}" in page

    where = ("problem", "drawn", *keys)
    found = curves("results/fedslr-planted-more", "train/global/rank", *where)
    shares = curves("results/fedslr-planted-more", "train/personalized/support", *where)
    for problem in dict.fromkeys(key[0] for key in found):
        planted, rows = int(problem.split()[1].strip(",")), []
        for number in "012":
            mine = [key for key in found if key[:2] == (problem, number)]
            own = {key[2:]: (found[key][-1], shares[key][-1]) for key in mine}
            line = [f"{own[k, '0.15'][0]:g}" for k in ("0.1", "0.3", "1")]
            line.append(f"{max(share for _, share in own.values()):.2f}")
            right = [share for rank, share in own.values() if rank == planted]
            rows.append([*line, f"{max(right):.2f}" if right else "–"])
        cells = [", ".join(column) for column in zip(*rows, strict=True)]
        assert f"| {problem} | {' | '.join(cells)} |" in page, cells
    corner = [shares["rank 2, noise 0.5", number, "0.1", "0.15"][-1] for number in "012"]
    assert "the shares there are {:.2f}, {:.2f} and {:.2f}.".format(*corner) in page
    both = shares["rank 2, noise 0.5", "2", "0.3", "0.4"][-1]
    assert both > 0.9 and found["rank 2, noise 0.5", "2", "0.3", "0.4"][-1] == 2

    errors = curves("results/fedslr-kinds", "train/personalized/total_error", "run", *keys)
    kinds = ("LR+S", "LR+LR", "S+LR", "S+S")
    least = [
        min((k for k in errors if k[0] == kind), key=lambda k: errors[k][-1]) for kind in kinds
    ]
    assert {k[1:] for k in least} == {("0.1", "0.05")}
    row = " | ".join(f"{errors[k][-1]:.2f}" for k in least)
    assert f"| error | {row} |" in page
    assert errors["LR+S", "0.1", "0.4"][-1] > errors["S+LR", "0.1", "0.4"][-1]
    assert errors["LR+S", "0.1", "0.4"][-1] > errors["LR+LR", "0.1", "0.4"][-1]

    columns = ["test/global/accuracy", "parameters/global"]
    columns += [column.replace("global", "personalized") for column in columns]
    columns += [f"comm/{k}link_bytes" for k in ("down", "up")]
    scores, sizes, mixed, whole, *ways = (
        curves("results/fedslr-ablations", column, "run", "seed") for column in columns
    )
    means: dict[str, list[float]] = {}
    for run in dict.fromkeys(run for run, _ in scores):
        ends = [[own[run, seed][-1] for seed in "01"] for own in (scores, mixed)]
        points = [f"{100 * np.mean(e):.2f} ± {100 * np.std(e, ddof=1):.2f}" for e in ends]
        counts = [np.mean([own[run, seed][-1] for seed in "01"]) / 1e3 for own in (sizes, whole)]
        sent = sum(np.mean([own[run, seed][-1] for seed in "01"]) for own in ways) / 1e6
        means[run] = [100 * np.mean(end) for end in ends] + counts
        cells = [points[0], f"{counts[0]:.1f}", points[1], f"{counts[1]:.1f}", f"{sent:.1f}"]
        row = f"| {run} | {' | '.join(cells)} |".replace(" nan ± nan | nan |", " | |")
        assert row in page, row
    ends = [
        [line[-1] for line in curves("results/fedslr-thresholds", column, "seed").values()]
        for column in columns[:2]
    ]
    score = f"{100 * np.mean(ends[0]):.2f} ± {100 * np.std(ends[0], ddof=1):.2f} %"
    assert f"{np.mean(ends[1]) / 1e3:.1f} thousand (yes), at an accuracy of {score}" in page
    two = means["LR+S (FedSLR)"], means["LR+LR"]
    assert f"LR+LR is {two[1][1] - two[0][1]:.2f} points ahead" in page
    assert f"with {two[1][3] - two[0][3]:.0f} thousand parameters more" in page
    behind = " and ".join(f"{two[0][1] - means[run][1]:.1f}" for run in ("S+LR", "S+S"))
    assert f"S+LR and S+S are behind by {behind}." in page
    assert f"| {two[0][0] - means['S+S'][0]:.1f} points; one deviation" in page

    keys = "low_rank_penalty", "proximal_step", "seed"
    scores, sizes = (curves("results/fedslr-plane", column, *keys) for column in columns[:2])
    for penalty in ("0.0002", "0.001", "0.005"):
        cells = []
        for step in ("2", "10", "50"):
            ends = [100 * scores[penalty, step, seed][-1] for seed in "01"]
            size = np.mean([sizes[penalty, step, seed][-1] for seed in "01"]) / 1e3
            cells.append(f"{np.mean(ends):.2f} ± {np.std(ends, ddof=1):.2f}; {size:.1f}")
        assert f"| {penalty} | {' | '.join(cells)} |" in page, cells

    clients = curves("results/fedslr-clients/clients", "accuracy", "run")
    for (run,), accuracies in clients.items():
        gains = 100 * (np.array(accuracies) - clients[("FedAvg",)])
        row = f"| {run} | {np.median(gains):.2f} | {(gains > 0).sum()} | {(gains < 0).sum()} |"
        assert row in page or run == "FedAvg", row
    pairs = curves("results/fedslr-clients/pairs", "accuracy", "extractor", "classifier")
    for name, kind in (("mixed", "personalized"), ("global", "global")):
        cells = [f"{100 * np.mean(pairs[kind, k]):.2f}" for k in ("personalized", "global")]
        assert f"| {name} | {' | '.join(cells)} |" in page, cells

    times = curves("results/fedslr-table9", "dense_ms", "parameters")
    thin = curves("results/fedslr-table9", "factored_ms", "parameters")
    medians = [(np.median(times[size]), np.median(thin[size])) for size in times]
    row = " | ".join(f"{b / a:.2f}" for a, b in medians)
    assert f"| thin / dense | {row} |" in page

    ways = [
        curves("results/fedslr-penalties", f"comm/{k}link_bytes", "change") for k in ("down", "up")
    ]
    shares = {k[0]: np.divide(*(w[k][-1] - w[k][-2] for w in ways)) for k in ways[0]}
    other = {round(s, 2) for k, s in shares.items() if "pure personal" not in k}
    assert sorted(other) == [0.08, 0.15, 0.81, 1.0]
    assert [round(shares[k], 2) for k in ("λ = 5e-3", "η_g = 20", "η_g = 100")] == [
        0.15,
        0.81,
        0.08,
    ]


def test_the_numbers_of_fedslr_on_fashion_mnist_are_those_of_its_data():
    page, scores = (PAPERS / "fedslr.md").read_text(), {}
    page = page[page.index("## Tables 1 and 2 on Fashion-MNIST") : page.index("## Tables 3 to 8")]
    for model in ("global", "personalized"):
        lines = curves("results/fedslr-fashion", f"test/{model}/accuracy", "run", "seed")
        scores[model] = {
            run: 100 * np.array([lines[run, seed][-1] for seed in "01"]) for run, _ in lines
        }
    labels = {"FedPer": "FedPer (FedRep in the code)", "LocalTrain": "Local"}
    mixed, gkr = scores["personalized"]["FedSLR"], scores["global"]["FedSLR"]
    shown = {"global": ("SCAFFOLD", "FedDyn", "FedAvg", "FedSLR")}
    shown["personalized"] = ("LG-FedAvg", "FedRep", "FedPer", "Ditto", "APFL", "LocalTrain")
    shown["personalized"] += ("FedSpa", "FedSLR")
    for model, runs in shown.items():
        for run in runs:
            own = scores[model][run]
            label = labels.get(run, run)
            if run == "FedSLR":
                label += " (GKR)" if model == "global" else " (mixed)"
            assert f"| {label} | {own.mean():.2f} ± {own.std(ddof=1):.2f} |" in page

    def counts(differences):  # as the protocol says
        return abs(differences.mean()) > 1 and abs(np.sign(differences).sum()) == 2

    told = [r for r in shown["personalized"] if counts(mixed - scores["personalized"][r])]
    assert told == ["LG-FedAvg", "FedPer", "Ditto", "LocalTrain", "FedSpa"]
    assert not any((mixed - own).mean() < -1e-9 for own in scores["personalized"].values())
    less = {run: (mixed - scores["personalized"][run]).mean() for run in told}
    assert f"and FedPer by {less.pop('FedPer'):.2f}." in page
    assert f"by {min(less.values()):.1f} to {max(less.values()):.1f} points" in page
    assert f"By {(gkr - scores['global']['FedAvg']).mean():.2f} points." in page
    ahead = gkr - scores["global"]["FedDyn"]
    assert f"is {ahead.mean():.2f} points ahead, behind in one seed" in page and min(ahead) < 0
    ditto = scores["personalized"]["Ditto"] - scores["personalized"]["LocalTrain"]
    text = "Ahead in one seed by {:.2f} points, behind in the other by {:.2f}."
    assert text.format(ditto[0], -ditto[1]) in page
    sent = [
        curves("results/fedslr-fashion", f"comm/{k}link_bytes", "run", "seed")
        for k in ("down", "up")
    ]
    assert all(own["FedSLR", seed] == own["FedAvg", seed] for own in sent for seed in "01")


def test_the_numbers_of_fedclup_are_those_of_its_data():
    page = (PAPERS / "fedclup.md").read_text()

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


def test_the_numbers_of_fedagg_are_those_of_its_data():
    page = (PAPERS / "fedagg.md").read_text()

    keys = ("run", "setting", "participation", "round")
    accuracy: dict[Any, list[float]] = curves(
        "results/fedagg-linear", "test/global/accuracy", *keys
    )
    for label, run, last in (("FedAvg, 60", "FedAvg", "30"), ("FedAgg, 67", "FedAgg", "10")):
        columns = [(s, p) for s in ("IID", "non-IID") for p in ("20 %", "100 %")]
        means = [np.mean(accuracy[run, f"linear, {s}", p, last]) for s, p in columns]
        row = " | ".join(f"{100 * mean:.2f}" for mean in means)
        assert f"| {label} models | {row} |" in page

    scores = curves("results/fedagg-dynamics", "test/global/accuracy", "setting", "run")
    for run in {run for _, run in scores}:
        cells = [
            ", ".join(f"{100 * scores[setting, run][k // 2 - 1]:.1f}" for k in (4, 10, 20, 30))
            for setting in ("IID", "non-IID")
        ]
        assert f"| {run} | {' | '.join(cells)} |" in page
    pairs = (("FedAgg", "FedAvg", [15, 9]), ("FedAgg", "FedAgg, aggregated", [13, 10]))
    for one, other, ahead in pairs:  # in how many of 15 rounds the one is above the other
        lines = [np.subtract(scores[s, one], scores[s, other]) for s in ("IID", "non-IID")]
        assert [int((line > 0).sum()) for line in lines] == ahead and len(lines[0]) == 15
    keys = ("run", "setting", "participation")
    for run, model in (("FedAvg", "global"), ("FedGH", "personalized")):
        own = curves("results/fedagg-fedgh", f"test/{model}/accuracy", *keys)
        columns = [
            100 * np.array(own[run, f"linear, {s}", p])
            for s in ("IID", "non-IID")
            for p in ("20 %", "100 %")
        ]
        assert {len(values) for values in columns} == {5}
        whole = curves("results/fedagg-linear", f"test/{model}/accuracy", *keys, "round")
        for share, values in zip(("20 %", "100 %"), columns[2:], strict=True):
            np.testing.assert_allclose(
                values / 100, whole[run, "linear, non-IID", share, "30"], atol=1e-6
            )
        cells = [f"{values.mean():.2f} ± {values.std(ddof=1):.2f}" for values in columns]
        assert f"| {run} | {' | '.join(cells)} |" in page


def test_the_numbers_of_fedagg_on_fashion_mnist_are_those_of_its_data():
    page, keys = (PAPERS / "fedagg.md").read_text(), ("run", "setting", "round")
    scores = curves("results/fedagg-fashion", "test/global/accuracy", *keys)
    personal = curves("results/fedagg-fashion", "test/personalized/accuracy", *keys)
    settings, printed = ("linear, IID", "linear, non-IID"), {}
    for line in Reproduction.from_file("results/fedagg-linear").tables[0]["printed"].items():
        printed[line[0]] = line[1][::2]  # with 20 % of the clients
    ahead = {}
    for run, print_ in printed.items():
        cells = []
        for setting, theirs, base in zip(settings, print_, printed["FedAvg"], strict=True):
            own = 100 * np.array((personal if run == "FedGH" else scores)[run, setting, "30"])
            less = 100 * np.array(scores["FedAvg", setting, "30"])
            ahead[run, setting], difference = own - less, own.mean() - less.mean()
            text = f" {difference:+.2f} ({theirs - base:+.2f})" if run != "FedAvg" else ""
            cells.append(f"{own.mean():.2f} ± {own.std(ddof=1):.2f} |{text} |")
        assert f"| {run} | {' '.join(cells)}" in page
    better = [
        {run for run in printed if ahead[run, s].mean() > ahead["FedAgg", s].mean()}
        for s in settings
    ]
    assert better == [{"FedDyn", "FedAdam", "FedYogi"}, {"FedDyn"}]
    behind = np.subtract(ahead["FedDyn", settings[1]], ahead["FedAgg", settings[1]]).mean()
    assert f"{behind:.2f} points behind FedDyn" in page
    texts = []
    for setting, word in zip(settings, ("IID", "non-IID"), strict=True):
        pairs = [(run, k) for run in ("FedAgg", "FedAvg") for k in ("10", "20")]
        means = [100 * np.mean(scores[run, setting, k]) for run, k in pairs]
        texts.append("{:.1f} and {:.1f} against {:.1f} and {:.1f} {}".format(*means, word))
    assert f"In rounds 10 and 20: {', '.join(texts)}. | yes |" in page
    adaptive = np.array([ahead[run, settings[1]] for run in ("FedAdam", "FedYogi")])
    assert f"worse in every seed, by {-adaptive.max():.1f} to {-adaptive.min():.1f} points" in page
    assert all((ahead[run, settings[0]] > 0).all() for run in ("FedAdam", "FedYogi"))
    assert (ahead["FedAdagrad", settings[0]] < 0).all()
    assert (ahead["FedAdagrad", settings[1]] > 0).sum() == 2
    assert all(abs(ahead["FedProx", setting]).max() < 0.055 for setting in settings)
    for run in ("FedDyn", "FedAgg"):
        assert all((ahead[run, setting] > 0).all() for setting in settings)
    falls = [
        100 * np.subtract(scores["FedAvg", s, "30"], scores["FedAgg", s, "10"]).mean()
        for s in settings
    ]
    assert "By {:.1f} points IID and {:.1f} non-IID.".format(*falls) in page

    data = FashionMNISTDataModule(num_clients=100)
    if not data.installed.exists():
        return
    data.prepare_data()  # a nearest class mean, worked out without the framework
    (x, y), (own, labels) = (
        [np.asarray(part, np.float64).reshape(len(part), -1).squeeze() for part in data.read(train)]
        for train in (True, False)
    )
    means = np.stack([x[y == k].mean(0) for k in range(10)])
    nearest = (np.square(means).sum(1) - 2 * own @ means.T).argmin(1)
    assert f"is right in {100 * (nearest == labels).mean():.1f} %" in page


def test_the_numbers_of_fedacs_are_those_of_its_data():
    page = (PAPERS / "fedacs.md").read_text()

    columns = ("test/personalized/accuracy", "test/global/accuracy", "collaborators")
    keys = ("run", "setting")
    both = [curves("results/fedacs-fashion/runs", column, *keys) for column in columns[:2]]
    scores = {place: [100 * np.array(own[place]) for own in both] for place in both[0]}
    for (run, setting), models in scores.items():
        cells = [f"{x.mean():.2f} ± {x.std(ddof=1):.2f}".replace("nan ± nan", "–") for x in models]
        assert f"| {run} | {' | '.join(cells)} |" in page, (run, setting)
    scarce = "(b) 50 samples"
    ditto, per = scores["Ditto", scarce], scores["Per-FedAvg", scarce]
    mean = {run: models[0].mean() for (run, where), models in scores.items() if where == scarce}
    text = f"APFL is {mean['APFL'] - mean['FedACS']:.2f} points ahead; Ditto and FedAMP are"
    text += (
        f" {mean['FedACS'] - mean['Ditto']:.2f} and {mean['FedACS'] - mean['FedAMP']:.2f} behind."
    )
    assert text in page
    assert f"it is {mean['FedACS'] - mean['LocalTrain']:.2f} points ahead" in page
    gains = [np.subtract(*models).mean() for models in (ditto, per)]
    assert f"Ditto's by {gains[0]:.2f}, Per-FedAvg's by {gains[1]:.2f} points" in page
    enough = {r: m[0].mean() for (r, where), m in scores.items() if where == "(a) Dirichlet 0.5"}
    enough.pop("FedAvg")
    below = np.median([*enough.values()]) - enough["FedACS"]
    assert f"| {below:.2f} below the median of the seven, and as much below" in page
    assert f"{below:.2f}" == f"{enough['LocalTrain'] - enough['FedACS']:.2f}"
    assert f"APFL is {enough['APFL'] - enough['FedACS']:.2f} points ahead. | just |" in page
    many = {run: models for (run, where), models in scores.items() if where == "(b) 500 clients"}
    mean = {run: own.mean() for run, (own, _) in many.items() if run != "FedAvg"}
    assert sorted(mean, key=lambda run: mean[run])[:2] == ["pFedMe", "FedACS"]
    behind = [mean["APFL"], many["FedAvg"][1].mean(), mean["LocalTrain"]] - mean["FedACS"]
    text = "{:.2f} points behind APFL, {:.2f} behind FedAvg's one model and {:.2f} behind"
    assert text.format(*behind) in page
    spread = {run: many[run][0].std(ddof=1) for run in mean}
    larger = [run for run in mean if spread[run] > spread["FedACS"]]
    assert larger == ["pFedMe"]
    assert f"{spread['FedACS']:.2f}; only pFedMe's is larger." in page
    gains = [np.subtract(*many[run]).mean() for run in ("Per-FedAvg", "Ditto")]
    assert f"Per-FedAvg's by {gains[0]:.2f} points; Ditto's are {-gains[1]:.2f} behind." in page
    above = [many[run][1].mean() - mean["LocalTrain"] for run in ("Ditto", "Per-FedAvg")]
    assert "better, by {:.2f} and {:.2f} points".format(*above) in page
    lines = curves("results/fedacs-rounds", columns[0], "run", "round")  # three seeds each
    for run in ("LocalTrain", "FedACS"):
        values = [100 * np.array(lines[run, k]) for k in ("20", "60", "100")]
        cells = [f"{own.mean():.2f} ± {own.std(ddof=1):.2f}" for own in values]
        assert f"| {run} | {' | '.join(cells)} |" in page
    first, last = (
        100 * np.subtract(lines["FedACS", k], lines["LocalTrain", k]) for k in ("20", "100")
    )
    text = "From {:.2f}, {:.2f} and {:.2f} points to {:.2f}, {:.2f} and {:.2f}. | yes |"
    assert text.format(*first, *last) in page and (last > first).all()
    assert f"| {last.mean():.2f} points. | just not |" in page
    place = ("run", "participants", "seed")
    ends = {
        key: 100 * line[-1]
        for key, line in curves("results/fedacs-participants", columns[0], *place).items()
    }
    inside = curves("results/fedacs-participants-shares", "share", *place)
    counts = ("5", "10", "20")
    for run in dict.fromkeys(run for run, *_ in ends):
        seeds = [[ends[run, count, seed] for seed in "012"] for count in counts]
        cells = [f"{np.mean(own):.2f} ± {np.std(own, ddof=1):.2f}" for own in seeds]
        assert f"| {run} | {' | '.join(cells)} |" in page
        if run == "LocalTrain":
            alone = np.mean(seeds, axis=1)
            continue
        gain = [f"{mean:.2f}" for mean in np.mean(seeds, axis=1) - alone]
        assert " and ".join((", ".join(gain[:2]), gain[2])) in page.replace(" points", "")
        found = [
            ", ".join(f"{inside[run, count, seed][0]:.2f}" for seed in "012") for count in counts
        ]
        row = " | ".join(found).replace("nan, nan, nan", "–")
        assert f"| {run} | {row} |" in page
    gaps = curves("results/fedacs-theory", "train/personalized/attention_gap", "run", "rounds")
    counts = ("16", "64", "256", "1024")
    for run in ("steps", "mixtures"):
        own = [gaps[run, count] for count in counts]
        ends = [[np.mean(line) for line in own], [line[-1] for line in own]]
        means, last = (" | ".join(f"{value:.1e}" for value in values) for values in ends)
        assert f": mean gap | {means} |\n| its last gap | {last} |" in page
        if run == "steps":
            slope = np.polyfit(np.log([*map(int, counts)]), np.log(ends[0]), 1)[0]
            assert f"-0.5 ± 0.15 or less. | {slope:.2f} | yes |" in page
            factors = np.divide(ends[1][:-1], ends[1][1:])
            assert [round(factors.min()), round(factors.max())] == [4, 7]
    assert (np.diff(ends[1]) > 0).all() and f"| {ends[1][-1] / ends[1][0]:.1f} times. Why" in page
    lines = [curves("results/fedacs-groups", column, "run", "seed") for column in columns]
    weights = table(ROOT / "docs" / "data" / "results" / "fedacs-groups-weights.csv")
    shares: dict[Any, float] = {}
    for run, seed, number in {(row["run"], row["seed"], row["round"]) for row in weights}:
        own = [
            row for row in weights if (row["run"], row["seed"], row["round"]) == (run, seed, number)
        ]
        inside = sum(float(row["weight"]) for row in own if row["angle"] == row["partner_angle"])
        shares[run, seed, number] = inside / sum(float(row["weight"]) for row in own)
    assert len([key for key in shares if key[0] == "FedACS, p = 0.75"]) == 18
    assert {
        s for key, s in shares.items() if key[0] in ("FedACS, p = 0.75", "FedACS, p = 0.9")
    } == {1}
    plain = [float(row["weight"]) for row in weights if row["run"] == "FedACS, no threshold"]
    assert f"is {100 * (max(plain) / min(plain) - 1):.1f} % above the smallest" in page
    for run in {run for run, _ in lines[0]}:
        mine = [[own[run, seed][-1] for seed in "012"] for own in lines]
        scores = 100 * np.array(mine[1] if run == "FedAvg" else mine[0])
        text = f"{scores.mean():.2f} ± {scores.std(ddof=1):.2f}"
        if run == "FedACS, p = 0.75":
            text = f"**{text}**"
        partners = f" {np.mean(mine[2]):.1f}" if run.startswith("FedACS") else ""
        share = ", ".join(f"{shares[run, s, '40']:.2f}" for s in "012" if (run, s, "40") in shares)
        share = share or ("–" if partners else "")
        cells = f"| {run} | {text} |{partners} | {share} |".replace("|  |", "| |")
        assert cells in page, cells


RESULTS = [f"results/{path.stem}" for path in (ROOT / "configs/results").glob("*.yaml")]


@pytest.mark.parametrize(
    "name",
    [name for name in FIGURES + RESULTS if (ROOT / "docs" / "data" / f"{name}.csv").exists()],
)
def test_data_of_the_pages_are_those_of_the_figures_file(name):
    """The data have every run at every point of the grid, and no other."""
    figure = Reproduction.from_file(name)
    data = table(ROOT / "docs" / "data" / f"{name}.csv")
    assert {"run", *figure.grid, "seed"} <= set(data[0])

    def place(*values):
        return tuple(f"{v:.7g}" if isinstance(v, float) else str(v) for v in values)

    last = {place(r["run"], *(r[k] for k in figure.grid), r["seed"]): r for r in data}
    jobs = {place(job.run, *job.axes.values(), job.seed): job for job in figure.jobs()}
    assert last.keys() == jobs.keys()
    if "round" not in data[0]:  # a table of last rounds alone, without curves
        return
    for key, job in jobs.items():
        trainer = job.config["trainer"]
        stops = any(
            "EarlyStopping" in entry["class_path"] for entry in trainer.get("callbacks", [])
        )
        ends = stops or last[key]["diverged"] == "1"
        assert ends or float(last[key]["round"]) == trainer["max_epochs"]
