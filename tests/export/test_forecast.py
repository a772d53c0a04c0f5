"""A forecast of series of unlike sizes: scored, predicted and exported in their own units."""

import csv
import json

import numpy as np
import pytest
import torch
import yaml

from tests.commands import call, table
from tests.export.test_raw_samples import outputs_of_the_lines

pytestmark = pytest.mark.cli
WINDOW = 4
SERIES = {"007": (5.0, 1.0), "7": (3_000.0, 800.0), "07": (0.5, 0.1)}


def values_of(name, months):
    """A year's wave around a mean."""
    mean, size = SERIES[name]
    return mean + size * np.sin(2 * np.pi * np.arange(*months) / 12)


def write_series(path, months, names=tuple(SERIES), shuffled=False):
    """Writes the months of each series, perhaps not in their order."""
    rows = []
    for name in names:
        source = name if name in SERIES else "7"
        values = values_of(source, months)
        rows += [[name, m, v] for m, v in zip(range(*months), values.tolist(), strict=True)]
    if shuffled:
        np.random.default_rng(0).shuffle(rows)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["site", "month", "value"], *rows])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of FedAvg on three series, and files of what comes later."""
    folder = tmp_path_factory.mktemp("forecast")
    write_series(folder / "series.csv", (0, 60))
    write_series(folder / "new.csv", (60, 66), shuffled=True)
    write_series(folder / "year.csv", (56, 72))
    write_series(folder / "other.csv", (56, 72), ["7", "8"])
    network = {"class_path": "LogisticRegression"}
    network["init_args"] = {"in_features": WINDOW, "num_classes": 1}
    data = {
        "target_column": "value", "client_column": "site", "partition": "Natural",
        "window": WINDOW, "order_column": "month",
        "protocol": {"class_path": "SplitOwn", "init_args": {"order": "month"}},
    }  # fmt: skip
    own = {"transforms": [{"class_path": "Normalize", "init_args": {"of": "client"}}]}
    own |= {"scale_targets": "client", "target_kind": "numbers"}
    config = {
        "trainer": {
            "name": "a", "max_epochs": 30, "default_root_dir": str(folder),
            "enable_progress_bar": False,
        },
        "model": {"class_path": "FedAvg", "init_args": {"network": network, "lr": 0.05}},
        "data": {
            "class_path": "TableDataModule",
            "init_args": {"file": str(folder / "series.csv"), **data, **own},
        },
        "loop": {"metrics": ["MASE", "MeanAbsoluteError"]},
    }  # fmt: skip
    (folder / "a.yaml").write_text(yaml.safe_dump(config))
    for name in ("year", "other"):
        given = {"file": str(folder / f"{name}.csv"), **data}
        content = {"data": {"class_path": "TableDataModule", "init_args": given}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    status, _, error = call("fit", "--config", folder / "a.yaml")
    assert status == 0, error
    return folder


def predicted(folder, file, *words):
    words = ["--rows", folder / file, "--id", "site", "--out", folder / "out.csv", *words]
    status, _, error = call("predict", folder / "a", *words)
    assert status == 0, error
    return table(folder / "out.csv")


def test_waves_of_all_sizes_are_learned(folder):
    """A window of a wave says what comes next; the mean errs by 0.64 of the wave's size."""
    for row in table(folder / "a" / "clients.csv"):
        error = float(row["test/global/mean_absolute_error"])
        assert error < 0.3 * SERIES[row["name"]][1]


def test_windows_that_end_with_the_new_rows_are_predicted(folder):
    """Six new months of a series have three windows; the one of months 60 to 63 forecasts 64."""
    rows = predicted(folder, "new.csv")
    assert len(rows) == 3 * len(SERIES)
    for name in SERIES:
        own = {int(row["month"]): float(row["prediction"]) for row in rows if row["site"] == name}
        assert sorted(own) == [63, 64, 65]
        error = np.abs(np.array([own[63], own[64]]) - values_of(name, (64, 66)))
        assert error.max() < 0.6 * SERIES[name][1]


@pytest.mark.parametrize("client", SERIES)
def test_the_lines_of_the_readme_predict_as_predict(folder, client, tmp_path, monkeypatch):
    """The run has one model, which each client uses with its own numbers."""
    words = ["--ckpt_path", folder / "a/checkpoints/last.ckpt", "--out", tmp_path]
    status, _, error = call("export", *words, "--client", client)
    assert status == 0, error
    (exported,) = tmp_path.iterdir()
    content = json.loads((exported / "card.json").read_text())
    assert (content["client_name"], content["model"]) == (client, "global")
    known = values_of(client, (60, 66)).astype(np.float32)
    inputs = np.lib.stride_tricks.sliding_window_view(known, WINDOW)[:, None].copy()
    outputs = outputs_of_the_lines(exported, torch.from_numpy(inputs), monkeypatch)
    rows = [row for row in predicted(folder, "new.csv") if row["site"] == client]
    rows.sort(key=lambda row: int(row["month"]))
    expected = [float(row["prediction"]) for row in rows]
    np.testing.assert_allclose(outputs[:, 0], expected, rtol=1e-5)


def test_new_samples_of_the_runs_clients_are_scored_in_their_own_units(folder):
    """MASE is the error over the moves of the series where the model was trained."""
    words = ["--data", folder / "year.yaml", "--out", folder / "scores"]
    status, _, error = call("evaluate", folder / "a", *words)
    assert status == 0, error
    predictions = predicted(folder, "year.csv")
    rows = table(folder / "scores" / "scores.csv")
    assert [row["site"] for row in rows] == sorted(SERIES)
    trained = {row["name"]: int(row["train_samples"]) for row in table(folder / "a/clients.csv")}
    for row in rows:
        own = {}
        for one in predictions:
            if one["site"] == row["site"]:
                own[int(one["month"]) + 1] = float(one["prediction"])
        own.pop(72)  # of a month that the file does not have
        errors = [abs(own[m] - values_of(row["site"], (m, m + 1))[0]) for m in own]
        assert float(row["mean_absolute_error"]) == pytest.approx(np.mean(errors), rel=1e-4)
        series = values_of(row["site"], (WINDOW, WINDOW + trained[row["site"]]))
        scale = np.abs(np.diff(series)).mean()
        assert float(row["mase"]) == pytest.approx(np.mean(errors) / scale, rel=1e-4)


def test_what_a_client_must_say_is_told(folder, tmp_path):
    words = ["--ckpt_path", folder / "a/checkpoints/last.ckpt", "--out", tmp_path]
    status, _, error = call("export", *words, "--global")
    assert (status, error.count("\n")) == (2, 1)
    assert "the run's targets are scaled by client" in error and "give --client" in error
    status, _, error = call("evaluate", folder / "a", "--data", folder / "other.yaml")
    assert (status, error.count("\n")) == (2, 1)
    assert "data.scale_targets of the run differs by client" in error and "'8'" in error
    rows = folder / "nameless.csv"
    rows.write_text("month,value\n" + "".join(f"{m},{m}\n" for m in range(6)))
    status, _, error = call("predict", folder / "a", "--rows", rows, "--out", tmp_path / "o.csv")
    assert (status, error.count("\n")) == (2, 1)
    assert "scaled by client; give --client or rows with the column 'site'" in error
    status, _, error = call(
        "predict", folder / "a", "--rows", rows, "--out", tmp_path / "o.csv", "--client", "07"
    )
    assert (status, error) == (0, "")
    assert len(table(tmp_path / "o.csv")) == 3
