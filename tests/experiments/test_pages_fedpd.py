"""The numbers of FedPD's page, worked out from the data beside it."""

import numpy as np
import pytest

from benchmarks.theory import fedpd
from datamodules import LeastSquares
from tests.experiments.pages import RECORD, curves, until

pytestmark = pytest.mark.cli


def constant_c2(eta, smooth):
    """C₂ of FedPD's theorems in the journal, with the least values that its appendix allows."""
    step = smooth * eta
    c6 = 3 * max(((1 + step) / eta) ** 2, (1 + 2 * eta) ** 2, step**2)
    rates = (1 - 2 * step - 4 * step**2) / (2 * eta), 1 / (2 * eta), (1 + 8 * step) / (2 * smooth)
    return 8 * smooth**2 * c6 / min(rates)


def skipping_bound(p, eta):
    """C(p) of the journal's Theorem 3 for L = 1 and N = 10."""
    c3 = (p * (1 + eta) + eta) / (1 - eta)
    squares = p * (1 - c3 ** (1 / (1 - p))) * (1 + eta) * (2 * eta + p * (3 + eta))
    squares /= 1 - 2 * eta - p * (1 + eta)
    return eta**2 * (1 - p) * 0.9 * 8 * constant_c2(eta, 1) * squares**2


def largest_gradient(**problem):
    """G², the largest |∇fᵢ|² of a client at the optimum, from 50 samples of each."""
    inputs, targets = LeastSquares(noise=0.0, **problem).train_arrays()
    x = np.linalg.lstsq(np.concatenate(inputs), np.concatenate(targets))[0]
    gradients = np.einsum("mnd,mn->md", inputs, inputs @ x - targets) / 50
    return np.square(gradients).sum(1).max()


def test_the_numbers_of_fedpd_are_those_of_its_data():
    page = (RECORD / "fedpd.md").read_text()

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
    assert words[0] + " steps, " + words[1] in page
    bounds = [fedpd.c2(eta, 0.59) * np.log(2) for eta, *_ in kinds]
    assert f"is at most {bounds[0]:.0f} and {bounds[1]:.0f}" in page
    bounds = [fedpd.mended_c2(eta, 0.59) * np.log(2) for eta, *_ in kinds]
    assert f"({bounds[0]:.0f} and {bounds[1]:.0f} with max(4L², 2) for the 4L² in C₂" in page

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
    largest = largest_gradient(seed=0)
    bounds = [skipping_bound(p, 0.3) * largest for p in by_p]
    row = " | ".join(f"{b:.1e}" if b else "0" for b in bounds)
    assert f"| C(p)G² of Theorem 3 in the journal | {row} |" in page
    printed = [fedpd.mean_gap(0.3, 1, 0, 1, clients=10, p=p, delta=largest**0.5) for p in by_p]
    row = " | ".join(f"{b:.1e}" if b else "0" for b in printed)
    assert f"| (14) of the preprint, with δ = G | {row} |" in page
    ratios = np.divide(bounds[1:], list(by_p.values())[1:])
    assert f"it is {ratios.min():.0e} to {ratios.max():.0e} times the floor" in page
    eta = (5**0.5 - 1) / 8
    for p in (0.01, 0.59):
        assert f"{skipping_bound(p, eta) / (eta * p) ** 2:,.0f} times" in page
    found = [fedpd.skipping(p, eta) / fedpd.table_2(p, eta) for p in (0.01, 0.59, 0.6, 0.9)]
    assert "is {:.2f} to {:.1f} times Table 2's 12ηp".format(*found[:2]) in page
    assert "{:.1f} to {:.1f} times its other form".format(*found[2:]) in page
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
    page = (RECORD / "fedpd.md").read_text()
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
    page = (RECORD / "fedpd.md").read_text()

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
    page = (RECORD / "fedpd.md").read_text()
    gaps = curves("results/fedpd-table3", "train/global/gap", "skip_probability", "seed")
    share = np.array([*dict.fromkeys(float(p) for p, _ in gaps)])
    # By p, seed and round; the last half of the rounds tells the floor.
    last = np.array([*gaps.values()]).reshape(10, 3, 800)[..., 400:]
    eta = (5**0.5 - 1) / 8
    steep = ((share * (1 + eta) + eta) / (1 - eta)) ** (2 / (1 - share))
    c = eta**2 * np.where(share < (1 - 2 * eta) / (1 + eta), 12 * share**2, 14 * steep)
    largest = [largest_gradient(condition=2.0, seed=seed) for seed in range(3)]
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


def test_the_training_accuracies_of_fedpd_are_those_of_their_data():
    page = (RECORD / "fedpd.md").read_text()
    name = "results/fedpd-mnist-training"
    trained = curves(name, "train/global/accuracy_pooled", "run")
    tested = curves(name, "test/global/accuracy_pooled", "run")
    last = {run: 100 * line[-1] for (run,), line in trained.items()}
    ahead = []
    for (run,), line in tested.items():
        assert f"| {run} | {last[run]:.2f} | {100 * line[-1]:.2f} |" in page
        ahead.append(last[run] - 100 * line[-1])
    others = [score for run, score in last.items() if run != "FedAvg"]
    assert f"The last, by {min(others) - last['FedAvg']:.1f} points." in page
    level = [last[run] for run in ("FedProx", "FedAvg, 0.01", "FedPD, p=0")]
    assert f"Within {max(level) - min(level):.1f} points." in page
    falls = [last["FedPD, p=0"] - last[f"FedPD, p={p}"] for p in (0.25, 0.5)]
    assert f"It falls, by {falls[0]:.1f} and {falls[1]:.1f} points." in page
    assert f"By {min(ahead):.1f} to {max(ahead):.1f}." in page
