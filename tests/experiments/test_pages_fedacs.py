"""The numbers of FedACS's page, worked out from the data beside it."""

from typing import Any

import numpy as np
import pytest

from benchmarks import published
from tests.experiments.pages import RECORD, curves, with_deviation

pytestmark = pytest.mark.cli


def test_the_numbers_of_fedacs_are_those_of_its_data():
    page = (RECORD / "fedacs.md").read_text()

    columns = ("test/personalized/accuracy", "test/global/accuracy", "collaborators")
    keys = ("run", "setting")
    both = [curves("results/fedacs-fashion/runs", column, *keys) for column in columns[:2]]
    scores = {place: [100 * np.array(own[place]) for own in both] for place in both[0]}
    for (run, setting), models in scores.items():
        cells = [with_deviation(x).replace("nan ± nan", "–") for x in models]
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
    two = {r: m[0].mean() for (r, where), m in scores.items() if where == "(a) two classes"}
    two.pop("FedAvg")
    best = sorted(two.values(), reverse=True)
    assert f"| {two['FedACS'] - np.median(best):.2f} above the median of the seven. | yes |" in page
    assert f"FedACS has {two['FedACS'] - two['APFL']:.2f} points more. The first four lie" in page
    assert f"within {best[0] - best[3]:.2f} points, of which" in page
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
        cells = [with_deviation(own) for own in values]
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
        cells = [with_deviation(own) for own in seeds]
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
    weights = published.rows("results/fedacs-groups-weights")
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
        text = with_deviation(scores)
        if run == "FedACS, p = 0.75":
            text = f"**{text}**"
        partners = f" {np.mean(mine[2]):.1f}" if run.startswith("FedACS") else ""
        share = ", ".join(f"{shares[run, s, '40']:.2f}" for s in "012" if (run, s, "40") in shares)
        share = share or ("–" if partners else "")
        cells = f"| {run} | {text} |{partners} | {share} |".replace("|  |", "| |")
        assert cells in page, cells


def test_the_numbers_of_cifar_are_those_of_its_data():
    page = (RECORD / "fedacs.md").read_text()
    page = page[page.index("## Tables 1 and 2 on CIFAR-10 as JPEG") :]
    keys = ("run", "alpha", "seed")
    scores = {}
    for kind in ("personalized", "global"):
        column = curves("results/fedacs-cifar", f"test/{kind}/accuracy", *keys)
        scores[kind] = {place: 100 * line[-1] for place, line in column.items()}
    alphas = ("0.1", "0.5", "1", "5", "10")

    def seeds(kind, run, alpha):
        return np.array([scores[kind][run, alpha, seed] for seed in "012"])

    rows = (
        ("FedACS", "personalized", "FedACS"),
        ("alone", "personalized", "LocalTrain"),
        ("Ditto, personalized", "personalized", "Ditto"),
        ("Ditto, global", "global", "Ditto"),
        ("Per-FedAvg, personalized", "personalized", "Per-FedAvg"),
        ("Per-FedAvg, global", "global", "Per-FedAvg"),
        ("FedAvg", "global", "FedAvg"),
    )
    for label, kind, run in rows:
        found = [seeds(kind, run, alpha) for alpha in alphas]
        cells = [with_deviation(one) for one in found]
        assert f"| {label} | {' | '.join(cells)} |" in page, label
    gains = [
        seeds("personalized", "FedACS", alpha) - seeds("personalized", "LocalTrain", alpha)
        for alpha in alphas
    ]
    assert ", ".join(f"{one.mean():.1f}" for one in gains) in page
    assert all((one < 0).all() for one in gains[:1])
    assert all((one > 0).all() for one in gains[1:])


def test_the_numbers_of_two_kinds_of_tests_are_those_of_their_data():
    page = (RECORD / "fedacs.md").read_text()
    page = page[page.index("## Table 2 on Fashion-MNIST") :]
    alphas = ("0.1", "0.5", "1", "5", "10")
    name = "results/fedacs-table2-fashion"
    keys = ("run", "tests", "alpha", "seed")
    own = curves(name, "test/personalized/accuracy", *keys)
    for key, line in curves(name, "test/global/accuracy", *keys).items():
        if key[0] == "FedAvg":
            own[key] = line

    def seeds(run, tests, alpha):
        return np.array([100 * own[run, tests, alpha, seed][-1] for seed in "12345"])

    labels = {"FedACS": "FedACS", "LocalTrain": "alone", "APFL": "APFL"}
    labels["FedAvg"] = "FedAvg, one model"
    ahead = {}
    for tests, word in (
        ("with the client's labels", "its labels"),
        ("on all labels", "all labels"),
    ):
        for run, label in labels.items():
            found = [seeds(run, tests, alpha) for alpha in alphas]
            cells = [with_deviation(one) for one in found]
            assert f"| {word} | {label} | {' | '.join(cells)} |" in page
        gains = [seeds("FedACS", tests, a) - seeds("LocalTrain", tests, a) for a in alphas]
        assert ", ".join(f"{one.mean():.1f}" for one in gains) in page
        ahead[word] = [
            a for a in alphas if seeds("APFL", tests, a).mean() > seeds("FedACS", tests, a).mean()
        ]
    assert ahead == {"its labels": [*alphas], "all labels": ["1", "5", "10"]}
