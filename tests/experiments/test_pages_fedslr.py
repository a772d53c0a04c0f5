"""The numbers of FedSLR's page, worked out from the data beside it."""

import numpy as np
import pytest

from tests.experiments.pages import RECORD, curves, with_deviation

pytestmark = pytest.mark.cli


def test_the_numbers_of_fedslr_are_those_of_its_data():
    page = (RECORD / "fedslr.md").read_text()

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
            cells.append(f"{with_deviation(ends)}; {size:.1f}")
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
    page, scores = (RECORD / "fedslr.md").read_text(), {}
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
            assert f"| {label} | {with_deviation(own)} |" in page

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
