"""Predictions for new images and arrays, computed again from the exported models."""

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.numpy import load_file

from tests.commands import call, done, table

pytestmark = pytest.mark.cli
RNG = np.random.default_rng(3)
SITES = ("north", "wëst")
SIZE = 3


def refused(*words):
    status, out, error = call(*words)
    assert (status, out, error.count("\n")) == (2, "", 1)
    return error.removeprefix("error: ").rstrip()


def fit(folder, data, outputs, method="LocalTrain", **arguments):
    """Trains a linear network on 3x3 inputs."""
    network = {"in_features": SIZE * SIZE, "num_classes": outputs}
    config = {
        "trainer": {
            "name": "run", "max_epochs": 2, "default_root_dir": str(folder),
            "enable_progress_bar": False,
        },
        "model": {
            "class_path": method,
            "init_args": {
                "network": {"class_path": "LogisticRegression", "init_args": network}, **arguments,
            },
        },
        "data": data,
    }  # fmt: skip
    (folder / "a.yaml").write_text(yaml.safe_dump(config))
    done("fit", "--config", folder / "a.yaml")


def weights_of(folder, client):
    """Weight and bias of a client's exported model, without the run's normalization."""
    done("export", folder / "run", "--client", client, "--out", folder / f"of {client}")
    (model,) = (folder / f"of {client}").iterdir()
    values = load_file(model / "model.safetensors")
    return values["head.weight"], values["head.bias"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A run on the images of two sites, and new images: pixels by path."""
    folder = tmp_path_factory.mktemp("images")
    new = {}
    for site in SITES:
        for label in ("cat", "dog"):
            place = folder / "old" / site / label
            place.mkdir(parents=True)
            for number in range(8):
                pixels = RNG.integers(0, 256, (SIZE, SIZE), np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")
        (folder / "new" / site).mkdir(parents=True)
        for number in range(2):
            pixels = RNG.integers(0, 256, (SIZE, SIZE), np.uint8)
            Image.fromarray(pixels).save(folder / "new" / site / f"{number}.png")
            new[f"{site}/{number}.png"] = pixels
    (folder / "new" / "notes.txt").write_text("no image")
    (folder / "new" / "north" / "._0.png").write_text("a copy that a system makes")
    arguments = {"folder": str(folder / "old"), "levels": "client/class", "colour": "gray"}
    fit(folder, {"class_path": "ImageFolderDataModule", "init_args": arguments}, 2)
    return folder, new


def test_new_images_are_predicted_by_the_models_of_their_sites(images, tmp_path):
    folder, new = images
    done("predict", folder / "run", "--rows", folder / "new", "--out", tmp_path / "p.csv")
    models = {site: weights_of(folder, site) for site in SITES}
    rows = table(tmp_path / "p.csv")
    assert [row["file"] for row in rows] == sorted(new)
    for row in rows:
        site = row["file"].split("/")[0]
        weight, bias = models[site]
        scores = weight @ (new[row["file"]].ravel() / 255) + bias
        assert row["model"] == site
        assert row["prediction"] == ["cat", "dog"][scores.argmax()]
        chance = 1 / (1 + np.exp(scores[0] - scores[1]))
        assert float(row["probability of dog"]) == pytest.approx(chance, rel=1e-5)


def test_mistakes_with_images_are_one_line(images, tmp_path):
    folder, _ = images
    run = folder / "run"
    north = folder / "new" / "north"
    assert refused("predict", run, "--rows", north) == (
        "predict: LocalTrain has a model for each client; give --client or images in folders with "
        "the clients' names"
    )
    other = tmp_path / "new" / "east"
    other.mkdir(parents=True)
    assert "it holds no images" in refused("predict", run, "--rows", tmp_path / "new")
    Image.fromarray(np.zeros((SIZE, SIZE), np.uint8)).save(other / "0.png")
    line = refused("predict", run, "--rows", tmp_path / "new")
    assert "the client 'east' of file east/0.png was not in the run; give --client" in line
    Image.fromarray(np.zeros((SIZE, SIZE + 1), np.uint8)).save(other / "0.png")
    line = refused("predict", run, "--rows", tmp_path / "new", "--client", "north")
    assert line.endswith("an input has the shape [1, 3, 4]; it must be [1, 3, 3], as in the run")
    line = refused("predict", run, "--rows", folder / "a.yaml")
    assert line.endswith("a.yaml: it must be a folder of images")
    line = refused("predict", run, "--rows", north, "--client", "north", "--id", "name")
    assert line == "predict: --id: name; only tables have columns"
    line = refused("predict", run, "--rows", north, "--global")
    assert line == "--global: LocalTrain has no global model; give --client"


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    """A run on arrays with two labels a sample and ids of clients."""
    folder = tmp_path_factory.mktemp("labels")
    inputs = RNG.normal(size=(40, SIZE * SIZE))
    targets = inputs[:, :2] > 0
    ids = np.array(["007", "7"] * 20)
    np.savez(folder / "old.npz", inputs=inputs, targets=targets, client_ids=ids)
    data = {"class_path": "ArrayDataModule", "init_args": {"file": str(folder / "old.npz")}}
    data["init_args"]["partition"] = "Natural"
    fit(folder, data, 2, "LocalTrain", loss="torch.nn.BCEWithLogitsLoss", lr=0.5)
    return folder


def test_each_label_of_new_arrays_has_its_columns(labels, tmp_path):
    inputs = RNG.normal(size=(5, SIZE * SIZE))
    ids = np.array(["7", "007", "7", "7", "007"])
    np.savez(tmp_path / "new.npz", inputs=inputs, client_ids=ids)
    out = tmp_path / "p.csv"
    done("predict", labels / "run", "--rows", tmp_path / "new.npz", "--out", out)
    models = {client: weights_of(labels, client) for client in ("007", "7")}
    for number, row in enumerate(table(out)):
        weight, bias = models[ids[number]]
        scores = weight @ inputs[number] + bias
        assert (row["sample"], row["model"]) == (str(number), ids[number])
        for label in (0, 1):
            chance = 1 / (1 + np.exp(-scores[label]))
            assert float(row[f"probability {label}"]) == pytest.approx(chance, rel=1e-4)
            assert float(row[f"prediction {label}"]) == (scores[label] > 0)


@pytest.mark.parametrize(
    ("arrays", "line"),
    [
        ({"inputs": np.zeros((2, 9), np.uint8)}, "inputs.dtype: torch.uint8; it must be torch.fl"),
        ({"inputs": np.full((2, 9), np.nan)}, "sample 0 has no value in a place; a prediction"),
        ({"inputs": np.zeros((2, 8))}, "an input has the shape [8]; it must be [9], as in the run"),
        ({"targets": np.zeros(2)}, "inputs: None; it must be an array in"),
        ({"inputs": np.zeros((2, 9)), "client_ids": ["7"]}, "number of client_ids: 1; it must be"),
        ({"inputs": np.zeros((1, 9)), "client_ids": ["07"]}, "the client '07' of sample 0 was not"),
    ],
)
def test_arrays_that_are_not_as_the_runs_are_one_line(labels, arrays, line, tmp_path):
    np.savez(tmp_path / "new.npz", **arrays)
    assert line in refused("predict", labels / "run", "--rows", tmp_path / "new.npz")


def test_a_run_whose_targets_have_no_place_in_a_row_is_refused(tmp_path):
    """The next letter at each of nine places."""
    tokens = torch.randint(0, 5, (12, 9), generator=torch.Generator().manual_seed(0)).numpy()
    np.savez(tmp_path / "old.npz", inputs=tokens, targets=tokens)
    network = {"vocabulary": 5, "num_classes": 5, "hidden": 2, "layers": 1, "every_token": True}
    config = {
        "trainer": {"name": "run", "max_epochs": 1, "default_root_dir": str(tmp_path)},
        "model": {
            "class_path": "FedAvg",
            "init_args": {"network": {"class_path": "LSTM", "init_args": network}},
        },
        "data": {
            "class_path": "ArrayDataModule",
            "init_args": {"file": str(tmp_path / "old.npz"), "num_clients": 2},
        },
    }
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(config))
    done("fit", "--config", tmp_path / "a.yaml")
    line = refused("predict", tmp_path / "run", "--rows", tmp_path / "old.npz")
    assert line.startswith("predict: a target of the run has the shape [9], which has no place in")


def test_a_data_module_without_files_of_its_own_says_so(tmp_path):
    (tmp_path / "new.csv").write_text("a\n1\n")
    words = ["--trainer.max_epochs=1", f"--trainer.default_root_dir={tmp_path}"]
    done("fit", "--config", "quickstart", *words)
    line = refused("predict", tmp_path / "quickstart", "--rows", tmp_path / "new.csv")
    assert "the run's data are DigitsDataModule, and new samples are read for those of" in line
