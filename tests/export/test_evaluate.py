"""`pfl evaluate` and `pfl predict RUN --rows`: every number beside plain PyTorch on raw files."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from pfl.cli.main import main
from tests.cli.configurations import SMALL, changed, write
from tests.commands import call, table

pytestmark = pytest.mark.cli

BLOOD = ["0", "A", "B"]
OUTCOMES = ["dead", "ill", "well"]
PARTS = ["weight", "bias"]
HOSPITALS = ["north", "south", "west"]


def patients(path, hospitals, outcomes, blood, seed):
    """Writes rows of patients, 12 for each hospital; the features in another order of columns."""
    rng = np.random.default_rng(seed)
    rows = []
    for hospital in hospitals:
        for _ in range(12):
            row = {"patient": f"{len(rows):03d}", "outcome": rng.choice(outcomes)}
            row |= {"blood": rng.choice(blood), "age": round(rng.normal(60, 10), 1)}
            rows.append({**row, "dose": round(rng.uniform(0, 3), 2), "hospital": hospital})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def features(rows):
    """Age, dose, and a column of 0 and 1 for each blood group of the run, [n, 5]."""
    values = [[float(r["age"]), float(r["dose"]), *(r["blood"] == b for b in BLOOD)] for r in rows]
    return np.array(values, np.float64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of Ditto on three hospitals; new rows; a function of raw rows to scores
    of a model, which needs nothing of the run but the exported weights."""
    folder = tmp_path_factory.mktemp("evaluate")
    train = patients(folder / "train.csv", HOSPITALS, OUTCOMES, BLOOD, 0)
    # The new file lacks an outcome and a blood group, and has another hospital.
    new = patients(folder / "new.csv", ["west", "east"], OUTCOMES[1:], BLOOD[:2], 1)
    config = {
        "trainer": {"name": "run", "max_epochs": 3, "default_root_dir": str(folder)},
        "model": {
            "class_path": "Ditto",
            "init_args": {
                "network": {
                    "class_path": "MLP",
                    "init_args": {"in_features": 5, "hidden": [4], "num_classes": 3},
                },
                "lr": 0.2,
            },
        },
        "data": {
            "class_path": "TableDataModule",
            "init_args": {
                "file": str(train),
                "target_column": "outcome",
                "client_column": "hospital",
                "feature_columns": ["age", "dose", "blood"],
                "categories": "one-hot",
                "num_clients": None,
                "partition": "Natural",
                "transforms": ["Normalize"],
            },
        },
    }
    config["trainer"]["enable_progress_bar"] = False
    assert main(["fit", "--config", str(write(folder / "run.yaml", config))]) == 0
    checkpoint = str(folder / "run" / "checkpoints" / "last.ckpt")
    words = ["--client", "all", "--global", "--out", str(folder / "models")]
    assert main(["export", "--ckpt_path", checkpoint, *words]) == 0
    known = features(table(train))
    mean = known.mean(0)
    std = known.std(0)

    def outputs(model, rows):
        weights = load_file(folder / "models" / model / "model.safetensors")
        network = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
        names = {"0": "body.linear1", "2": "head"}
        own = {f"{k}.{part}": weights[f"{names[k]}.{part}"] for k in names for part in PARTS}
        network.load_state_dict(own)
        x = torch.tensor((features(rows) - mean) / std).float()
        return network(x).detach()

    return folder, new, outputs


def other_data(folder, new):
    data = {"file": str(new), "target_column": "outcome", "client_column": "hospital"}
    data |= {"num_clients": None, "partition": "Natural"}
    content = {"data": {"class_path": "TableDataModule", "init_args": data}}
    return write(folder / "other.yaml", content)


def test_models_on_another_file_score_as_in_plain_pytorch(trained):
    folder, new, outputs = trained
    out = folder / "scores"
    status, printed, _ = call(
        "evaluate", folder / "run", "--data", other_data(folder, new), "--out", out
    )
    assert status == 0
    names = {"": "global"} | {name: f"client{number}" for number, name in enumerate(HOSPITALS)}
    seen = set()
    for row in table(out / "scores.csv"):
        rows = [one for one in table(new) if one["hospital"] == row["site"]]
        targets = torch.tensor([OUTCOMES.index(one["outcome"]) for one in rows])
        scores = outputs(names[row["client"]], rows)
        assert row["model"] == ("personalized" if row["client"] else "global")
        assert int(row["samples"]) == 12
        assert float(row["accuracy"]) == pytest.approx(
            (scores.argmax(1) == targets).double().mean().item()
        )
        loss = nn.functional.cross_entropy(scores, targets).item()
        assert float(row["loss"]) == pytest.approx(loss, abs=1e-5)
        seen.add((row["client"], row["site"]))
    assert seen == {(client, site) for client in names for site in ("west", "east")}
    matrix = table(out / "matrix.csv")
    assert [row["client"] for row in matrix] == ["", *HOSPITALS]
    scored = {(r["client"], r["site"]): r["accuracy"] for r in table(out / "scores.csv")}
    for row in matrix:
        for site in ("west", "east"):
            assert row[f"site {site}"] == scored[row["client"], site]
    assert (out / "matrix.png").read_bytes().startswith(b"\x89PNG")
    assert "own client" in printed


def test_whole_numbers_are_numbers_where_the_run_has_numbers(tmp_path, monkeypatch):
    """Alone, the file with other data would have the classes 3 and 5."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{k},{k / 4},{'ab'[k % 2]}" for k in range(20)]
    Path("stays.csv").write_text("\n".join(["age,stay,place", *rows, ""]))
    Path("other.csv").write_text("age,stay\n3,5\n4,3\n5,5\n")
    words = ["--data", "TableDataModule", "--data.file", "stays.csv"]
    words += ["--data.target_column", "stay", "--data.client_column", "place"]
    words += ["--model", "FedAvg", "--model.network", "LogisticRegression", "--model.lr", "0.001"]
    words += ["--model.network.in_features", "1", "--model.network.num_classes", "1"]
    assert call("fit", *words, "--trainer.max_epochs", "1", "--trainer.name", "run")[0] == 0
    other = {"file": "other.csv", "target_column": "stay", "num_clients": 1}
    content = {"data": {"class_path": "TableDataModule", "init_args": other}}
    file = write(tmp_path / "other.yaml", content)
    status, _, error = call("evaluate", "runs/run", "--data", file, "--split", "all", "--out", "e")
    assert status == 0, error
    assert call("predict", "runs/run", "--rows", "other.csv", "--out", "out.csv")[0] == 0
    predicted = [float(row["prediction"]) for row in table(Path("out.csv"))]
    errors = [(one - stay) ** 2 for one, stay in zip(predicted, (5, 3, 5), strict=True)]
    (row,) = table(Path("e/scores.csv"))
    assert float(row["loss"]) == pytest.approx(sum(errors) / 3, rel=1e-5)


def test_rows_are_predicted_as_in_plain_pytorch(trained):
    folder, new, outputs = trained
    rows = [row for row in table(new) if row["hospital"] == "west"]
    file = folder / "rows.csv"
    with file.open("w", newline="") as stream:  # without the target, in another order
        writer = csv.DictWriter(stream, ["hospital", "dose", "age", "blood", "patient"])
        writer.writeheader()
        writer.writerows({name: row[name] for name in writer.fieldnames} for row in rows)
    out = folder / "predictions.csv"
    for words, model in (
        ([], "client2"),
        (["--client", "north"], "client0"),
        (["--global"], "global"),
    ):
        status, _, err = call(
            "predict", folder / "run", "--rows", file, "--id", "patient", "--out", out, *words
        )
        assert status == 0, err
        found = table(out)
        assert [row["patient"] for row in found] == [row["patient"] for row in rows]
        scores = outputs(model, rows)
        assert [row["prediction"] for row in found] == [OUTCOMES[k] for k in scores.argmax(1)]
        chances = [[float(row[f"probability of {name}"]) for name in OUTCOMES] for row in found]
        np.testing.assert_allclose(chances, scores.softmax(1), atol=1e-5)


BAD = [
    (["--rows", "NEW"], "predict: --rows: the client 'east' of row 13 was not in the run; give "),
    (["--rows", "NEW", "--client", "nort"], "predict: --client: nort; it must be a client's name"),
    (["--rows", "NEW", "--global", "--id", "no"], "predict: --id: no; it must be a column of "),
    (["--rows", "none.csv"], "predict: --rows: none.csv; there is no such file or folder"),
]


@pytest.mark.parametrize(("words", "line"), BAD)
def test_mistakes_of_a_prediction_get_one_line(trained, words, line):
    folder, new, _ = trained
    words = [str(new) if word == "NEW" else word for word in words]
    status, out, err = call("predict", folder / "run", *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {line}")


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("", "row 2 after the names has no value of 'age'; a prediction needs one"),
        ("old", "the column 'age' holds 'old'; it must hold numbers"),
        ("inf", "the column 'age' holds a value that is infinite as float32"),
        ("1e39", "the column 'age' holds a value that is infinite as float32"),
    ],
)
def test_a_row_without_a_value_is_named(trained, cell, line):
    folder, _, _ = trained
    file = folder / "gap.csv"
    file.write_text(f"age,dose,blood\n50,1,A\n{cell},1,A\n")
    status, _, err = call("predict", folder / "run", "--rows", file, "--global")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: predict: --rows: {file}: ") and line in err


def test_a_column_that_new_rows_lack_is_named(trained):
    folder, _, _ = trained
    file = folder / "few.csv"
    file.write_text("age,blood\n50,A\n")
    status, _, err = call("predict", folder / "run", "--rows", file, "--global")
    line = "it lacks the column 'dose', an input of the run; its columns are age, blood"
    assert (status, err) == (2, f"error: predict: --rows: {file}: {line}\n")


CONVERTED = {
    "data: 'blood': a column of 0 and 1 for each of 0, A, B",
    "data: 'age', 'dose': rounded to float32, with 7 digits",
}


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("class_names", ["ill", "well", "fled"], "the class 'fled' is none of the run's"),
        (
            "feature_columns",
            ["age", "dose"],
            "its columns are age, dose; the run's are age, dose, ",
        ),
    ],
)
def test_data_that_do_not_fit_the_models_are_refused(trained, key, value, line):
    folder, new, _ = trained
    content = yaml.safe_load(other_data(folder, new).read_text())
    path = write(folder / "bad.yaml", changed(content, f"data.init_args.{key}", value))
    status, out, err = call("evaluate", folder / "run", "--data", path)
    assert (status, err.count("\n")) == (2, 1)
    assert set(out.splitlines()) <= CONVERTED
    assert err.startswith("error: evaluate: --data: ") and line in err


def test_outputs_without_a_class_have_names(tmp_path, monkeypatch):
    """A network with four outputs for two classes, of which it predicts the last one."""
    monkeypatch.chdir(tmp_path)
    lines = ["model,x,y", *(f"m{row},{row % 3},{'abab'[row % 4]}" for row in range(20))]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    weights = {"head.weight": torch.zeros(4, 1), "head.bias": torch.tensor([0.0, 0.0, 0.0, 9.0])}
    torch.save(weights, "first.pt")
    words = "--data TableDataModule --data.file a.csv --data.target_column y --data.num_clients 2"
    words += " --data.feature_columns [x] --model FedAvg --model.network LogisticRegression"
    words += " --model.network.in_features 1 --model.network.num_classes 4 --model.lr 1e-6"
    words += " --trainer.max_epochs 1 --trainer.default_root_dir . --trainer.name run"
    status, _, error = call("fit", *words.split(), "--model.weights", "first.pt")
    assert status == 0, error
    status, _, error = call("predict", "run", "--rows", "a.csv")
    assert status == 0, error
    rows = table(tmp_path / "predictions.csv")
    assert {row["prediction"] for row in rows} == {"output 3"}
    names = [name for name in rows[0] if name.startswith("probability")]
    assert names == [f"probability of {name}" for name in ("a", "b", "output 2", "output 3")]
    status, _, error = call("predict", "run", "--rows", "a.csv", "--id", "model")
    assert (status, error.count("\n")) == (2, 1)
    assert "predict: --id: model; predictions have a column of this name themselves" in error


def test_arrays_with_other_targets_are_refused_in_one_line(tmp_path, monkeypatch):
    """A run of two classes, with three outputs: it has a score for the class 2, and none for 3."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(24, 3)).astype(np.float32)
    ids = np.arange(24) % 2
    numbers = {"a": ids, "two": ids + 1, "three": ids + 2, "floats": ids.astype(np.float32)}
    for name, targets in numbers.items():
        np.savez(f"{name}.npz", inputs=inputs, targets=targets, client_ids=ids)
        given = {"file": f"{name}.npz", "num_clients": None, "partition": "Natural"}
        data = {"class_path": "ArrayDataModule", "init_args": given}
        write(tmp_path / f"{name}.yaml", {"data": data})
    words = "--model Ditto --model.network MLP --model.network.in_features 3 --trainer.name a"
    words += " --model.network.num_classes 3 --trainer.max_epochs 1 --trainer.default_root_dir ."
    assert call("fit", "--config", "a.yaml", *words.split())[0] == 0
    again = ["--client", "1", "0", "1"]
    status, _, error = call("evaluate", "a", "--data", "two.yaml", *again)
    assert status == 0, error
    rows = table(tmp_path / "a/evaluation/scores.csv")
    assert [row["client"] for row in rows] == ["", "", *"1100"]
    lines = {
        "three": "the class 3 of client '1'; the run's models know the classes 0 to 2",
        "floats": "its targets are floating numbers, 1 of a sample; the run's are classes",
    }
    for name, line in lines.items():
        status, _, error = call("evaluate", "a", "--data", f"{name}.yaml")
        assert (status, error.count("\n")) == (2, 1)
        assert error.startswith("error: evaluate: --data: ") and line in error


def test_a_run_on_its_own_test_samples_has_the_scores_of_the_run(tmp_path):
    """Client 5 never trains. Each model on its own client scores as `clients.csv` says."""
    config = changed(SMALL, "loop.unseen", [5])
    config["loop"]["finetune"] = [2]
    config["trainer"] |= {"default_root_dir": str(tmp_path), "enable_progress_bar": False}
    config["model"]["class_path"] = "FedRep"
    assert main(["fit", "--config", str(write(tmp_path / "a.yaml", config))]) == 0
    status = call("evaluate", tmp_path / "small")[0]
    assert status == 0
    rows = table(tmp_path / "small" / "evaluation" / "scores.csv")
    assert len(rows) == 2 * 6 * 6
    kinds = {"newcomer": "unseen/0"}
    clients = {row["client"]: row for row in table(tmp_path / "small" / "clients.csv")}
    own = [row for row in rows if row["client"] == row["site"]]
    for row in own:
        kind = kinds.get(row["model"], row["model"])
        for name in ("accuracy", "loss"):
            expected = float(clients[row["client"]][f"test/{kind}/{name}"])
            assert float(row[name]) == pytest.approx(expected, abs=1e-5)
    assert {row["model"] for row in own} == {"personalized", "newcomer", "finetuned/2", "unseen/2"}


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_clients_that_never_train_are_predicted_as_they_are_scored(buffers, tmp_path):
    """By the model of newcomers, here the global one, and not by the first personal one."""
    sizes = {"num_classes": 10, "image_size": 8, "in_channels": 1, "width": 4}
    config = changed(SMALL, "loop.unseen", [5])
    config["trainer"] |= {"default_root_dir": str(tmp_path), "enable_progress_bar": False}
    config["model"]["class_path"] = "Ditto"
    config["model"]["init_args"]["network"] = {"class_path": "CelebACNN", "init_args": sizes}
    config["model"]["init_args"]["buffers"] = buffers
    assert main(["fit", "--config", str(write(tmp_path / "a.yaml", config))]) == 0
    folder = tmp_path / "small"
    words = ["--config", folder / "config.yaml", "--ckpt_path", folder / "checkpoints/last.ckpt"]
    assert call("predict", *words)[0] == 0
    predicted = table(folder / "predictions.csv")
    for row in table(folder / "clients.csv"):
        mine = [one for one in predicted if one["client"] == row["client"]]
        kind = {"5": "unseen/0"}.get(row["client"], "personalized")
        right = np.mean([one["personalized"] == one["target"] for one in mine])
        assert right == pytest.approx(float(row[f"test/{kind}/accuracy"]))
        if row["client"] == "5":
            assert [one["personalized"] for one in mine] == [one["global"] for one in mine]


def test_a_client_without_test_samples_has_no_scores(tmp_path):
    """Its one row is trained on; no network and no transform takes a batch of no rows."""
    rows = [f"{place},{k},{'ill' if k % 2 else 'well'}" for place in "ab" for k in range(10)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["place,age,out", *rows, "c,5,ill"]) + "\n")
    data = {"file": str(path), "target_column": "out", "client_column": "place"}
    data |= {"num_clients": None, "partition": "Natural"}
    data["transforms"] = [{"class_path": "Normalize", "init_args": {"of": "client"}}]
    network = {"class_path": "LogisticRegression", "init_args": {"in_features": 1}}
    network["init_args"]["num_classes"] = 2
    content = {
        "trainer": {"name": "run", "max_epochs": 1, "default_root_dir": str(tmp_path)},
        "model": {"class_path": "LocalTrain", "init_args": {"network": network}},
        "data": {"class_path": "TableDataModule", "init_args": data},
    }
    content["trainer"]["enable_progress_bar"] = False
    assert main(["fit", "--config", str(write(tmp_path / "run.yaml", content))]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--out", str(tmp_path / "scores")]) == 0
    scores = table(tmp_path / "scores" / "scores.csv")
    assert {row["samples"] for row in scores if row["site"] == "c"} == {"0"}
    assert {row["accuracy"] for row in scores if row["site"] == "c"} == {"nan"}
    assert {row["samples"] for row in scores if row["site"] != "c"} == {"2"}  # a fifth of ten
    assert len(scores) == 3 * 3


def test_rows_name_no_client_of_a_rule_that_deals_samples_out(tmp_path, capsys):
    """The client 1 of `IID` is not the ward 1 of the file."""
    rows = [f"{k % 3},{k},{'ill' if k % 2 else 'well'}" for k in range(30)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["ward,age,out", *rows]) + "\n")
    data = {"file": str(path), "target_column": "out", "client_column": "ward", "num_clients": 3}
    network = {"class_path": "LogisticRegression", "init_args": {"in_features": 1}}
    network["init_args"]["num_classes"] = 2
    content = {
        "trainer": {"name": "run", "max_epochs": 1, "default_root_dir": str(tmp_path)},
        "model": {"class_path": "LocalTrain", "init_args": {"network": network}},
        "data": {"class_path": "TableDataModule", "init_args": data},
    }
    content["trainer"]["enable_progress_bar"] = False
    with pytest.warns(UserWarning, match="'ward' is not used by IID"):
        assert main(["fit", "--config", str(write(tmp_path / "run.yaml", content))]) == 0
    capsys.readouterr()
    words = ["predict", str(tmp_path / "run"), "--rows", str(path)]
    with pytest.warns(UserWarning, match="'ward' is not used by IID"):
        assert main([*words, "--out", str(tmp_path / "out.csv")]) != 0
    assert "LocalTrain has a model for each client; give --client" in capsys.readouterr().err


def test_a_name_with_a_comma_is_one_of_a_list(tmp_path, capsys):
    rows = [f'"{place}",{k},{k % 2}' for place in ("St. Mary, north", "coast") for k in range(10)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["place,age,out", *rows]) + "\n")
    data = {"file": str(path), "target_column": "out", "client_column": "place"}
    network = {"class_path": "LogisticRegression", "init_args": {"in_features": 1}}
    network["init_args"]["num_classes"] = 2
    content = {
        "trainer": {"name": "run", "max_epochs": 1, "default_root_dir": str(tmp_path)},
        "model": {"class_path": "LocalTrain", "init_args": {"network": network}},
        "data": {"class_path": "TableDataModule", "init_args": data},
    }
    content["trainer"]["enable_progress_bar"] = False
    assert main(["fit", "--config", str(write(tmp_path / "run.yaml", content))]) == 0
    new = tmp_path / "new.csv"
    new.write_text("place,age\nzzz,1\n")
    capsys.readouterr()
    for words, begin in ((["--client", "zzz"], "known are"), ([], "--client with one of")):
        assert main(["predict", str(tmp_path / "run"), "--rows", str(new), *words]) == 2
        assert f"{begin} 'St. Mary, north', coast\n" in capsys.readouterr().err
