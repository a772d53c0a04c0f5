"""The numbers of FedAgg's page, worked out from the data beside it."""

from typing import Any

import numpy as np
import pytest

from benchmarks import published
from datamodules import FashionMNISTDataModule
from pfl.experiments import Reproduction
from tests.experiments.pages import RECORD, curves, with_deviation

pytestmark = pytest.mark.cli


def test_the_numbers_of_fedagg_are_those_of_its_data():
    page = (RECORD / "fedagg.md").read_text()

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
        cells = [with_deviation(values) for values in columns]
        assert f"| {run} | {' | '.join(cells)} |" in page


def test_the_numbers_of_fedagg_on_fashion_mnist_are_those_of_its_data():
    page, keys = (RECORD / "fedagg.md").read_text(), ("run", "setting", "round")
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
            cells.append(f"{with_deviation(own)} |{text} |")
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


def test_the_numbers_of_fedagg_on_letters_are_those_of_its_data():
    page = (RECORD / "fedagg.md").read_text()
    scores = curves("results/fedagg-letters", "test/global/accuracy", "run", "partition")
    printed = {"FedAvg": (92.52, 90.98), "FedAdam": (93.09, 92.60), "FedAgg": (94.11, 93.67)}
    below = {}
    for run, values in printed.items():
        cells = []
        for partition, value in zip(("IID", "Dirichlet 0.6"), values, strict=True):
            line = scores[run, partition]
            below[run, partition] = value - 100 * line[-1]
            cells.append(f"{100 * line[-1]:.2f} ({value:.2f})")
        if np.isnan(scores[run, "Dirichlet 0.6"][-1]):
            cells[-1] = f"diverged in round 9 ({values[1]:.2f})"
        assert f"| {run} | {' | '.join(cells)} |" in page
    iid = [f"{below[run, 'IID']:.1f}" for run in printed]
    assert f"IID {iid[0]}, {iid[1]} and {iid[2]} points." in page
    others = [f"{below[run, 'Dirichlet 0.6']:.1f}" for run in ("FedAvg", "FedAdam")]
    assert f"FedAvg is {others[0]} and FedAdam {others[1]} below" in page
    gain = 100 * (scores["FedAgg", "IID"][-1] - scores["FedAvg", "IID"][-1])
    assert f"IID {gain:.2f} points ahead" in page


def test_the_numbers_of_fedagg_on_cifar_are_those_of_its_data():
    page = (RECORD / "fedagg.md").read_text()
    scores = curves("results/fedagg-cifar", "test/global/accuracy", "run")
    rounds = curves("results/fedagg-cifar", "round", "run")
    percent = {run: 100 * np.array(line) for (run,), line in scores.items()}
    assert (
        f"FedAvg {percent['FedAvg'][-1]:.2f} (66.27), FedAdam\n{percent['FedAdam'][-1]:.2f}" in page
    )
    assert np.isnan(percent["FedAgg"][-1]) and rounds["FedAgg",][-1] == 30
    where = rounds["FedAvg",].index(30)
    assert (
        f"diverged in round 30 (67.20), where FedAvg was at {percent['FedAvg'][where]:.2f}." in page
    )
    assert f"FedAvg is {66.27 - percent['FedAvg'][-1]:.1f} below" in page
    behind = percent["FedAvg"][where - 1] - percent["FedAgg"][-2]
    assert rounds["FedAgg",][-2] == 25
    assert f"After 25 rounds, its last evaluation, {behind:.1f} points behind." in page


def test_one_client_ends_the_runs_of_fedagg_that_diverge():
    page = (RECORD / "fedagg.md").read_text()
    noted = {}
    for row in published.rows("results/fedagg-diverged/rates"):
        where = (row["file"], int(row["round"]), int(row["epoch"]))
        noted.setdefault(where, []).append((float(row["gradient"]), float(row["rate"])))
    lines = {
        ("results/fedagg-letters", 8, 2): ("letters, Dirichlet 0.6, round 8", "{:.1e}"),
        ("results/fedagg-cifar", 30, 2): ("CIFAR-10, IID, round 30", "not finite"),
    }
    for where, (name, words) in lines.items():
        rates = [rate for _, rate in noted[where]]
        *others, last = sorted(noted[where], key=lambda one: (np.isnan(one[0]), one[0]))
        cells = [f"{min(rates):.3f} to {max(rates):.3f}", f"{last[1]:.3f}", words.format(last[0])]
        line = " | ".join([name, *cells, f"{max(gradient for gradient, _ in others):.0f}"])
        assert f"| {line} |" in page
        assert len(rates) == 20
    before = [rate for _, rate in noted["results/fedagg-cifar", 29, 2]]
    before += [rate for _, rate in noted["results/fedagg-cifar", 29, 1]]
    assert f"CIFAR-10's rates were at most {max(before):.3f}." in page


def test_smaller_rates_of_fedagg_do_not_diverge():
    page = (RECORD / "fedagg.md").read_text()
    runs = {}
    for row in published.rows("results/fedagg-diverged/caps"):
        runs.setdefault(row["run"], []).append(row)
    for run, rows in runs.items():
        assert [row["seed"] for row in rows] == ["0", "1", "2"]
        trained = [f"{100 * float(row['accuracy']):.2f}" for row in rows if row["accuracy"]]
        diverged = sum(row["diverged"] == "1" for row in rows)
        assert diverged == 3 - len(trained)
        assert f"| {run} | {diverged} | {', '.join(trained)} |" in page
