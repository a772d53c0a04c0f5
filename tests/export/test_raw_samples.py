"""Exported models take rows as a file has them, and predict what `pfl predict` writes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from datamodules import (
    Apply,
    DigitsDataModule,
    HorizontalFlip,
    Natural,
    Normalize,
    Pipeline,
    SplitOwn,
    TableDataModule,
)
from models import SmallCNN
from pfl.deploy.data import RemoteData
from pfl.export import card
from pfl.export.normalization import gap_values, normalization
from tests.commands import call, table

pytestmark = pytest.mark.cli

HOSPITALS = ["Charité", "Köln", "7"]
COLUMNS = ["age", "pressure", "dose", "constant"]
FIT = "--model FedPer --model.network MLP --model.network.in_features 4 --model.lr 0.01"
FIT += " --model.network.num_classes 1 --trainer.name a --trainer.max_epochs 2"
FIT += " --loop.clients_per_round=null"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of a regression on columns of very different sizes, and its predictions."""
    folder = tmp_path_factory.mktemp("raw")
    rng = np.random.default_rng(0)
    age = rng.normal(68, 14, 90).round(1)
    pressure = rng.normal(12000, 900, 90).round()
    dose = rng.normal(0.002, 0.0004, 90).round(5)
    lines = ["age,stay,pressure,hospital,dose,constant"]
    for row in range(90):
        stay = (age[row] - 68) / 10 + rng.normal(0, 0.1)
        cells = [age[row], round(stay, 3), pressure[row], HOSPITALS[row % 3], dose[row], 3.5]
        lines.append(",".join(map(str, cells)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("a.csv").write_text("\n".join(lines), encoding="utf-8")
        data = ["--data=TableDataModule", "--data.file=a.csv", "--data.target_column=stay"]
        data += ["--data.client_column=hospital", "--data.partition=Natural"]
        data += ["--data.num_clients=null", "--data.transforms+=Normalize"]
        status, _, error = call("fit", *data, *FIT.split())
        assert status == 0, error
        words = ["--config", "runs/a/config.yaml", "--ckpt_path", "runs/a/checkpoints/last.ckpt"]
        status, _, error = call("predict", *words)
        assert status == 0, error
        yield folder


def export(*words):
    status, _, error = call("export", "--ckpt_path", "runs/a/checkpoints/last.ckpt", *words)
    assert status == 0, error


def raw_rows(folder, content, client):
    """The client's rows of the CSV file, in the order of the card, and what the run predicts."""
    predicted = [
        row for row in table(folder / "runs/a/predictions.csv") if row["client"] == str(client)
    ]
    rows = table(folder / "a.csv")
    names = content["input"]["columns"]
    inputs = [[float(rows[int(row["sample"])][name]) for name in names] for row in predicted]
    return np.array(inputs, np.float32), [float(row["personalized"]) for row in predicted]


def outputs_of_the_lines(model, inputs, monkeypatch):
    """What the network of the README's lines gives for raw samples."""
    scope = {}
    lines = re.search(r"```python\n(.*?)```", (model / "README.md").read_text("utf-8"), re.S)[1]
    with monkeypatch.context() as patch, torch.no_grad():
        patch.chdir(model)
        exec(lines, scope)
        return scope["network"](inputs).numpy()


def test_the_lines_of_the_readme_take_raw_rows(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    export("--client", "Köln", "--out", tmp_path)
    (model,) = tmp_path.iterdir()  # the client's number is its place among the sorted names
    client = sorted(HOSPITALS).index("Köln")
    assert model.name == f"client{client}"
    content = json.loads((model / "card.json").read_text("utf-8"))
    assert content["client_name"] == "Köln"
    inputs, expected = raw_rows(folder, content, client)
    assert len(expected) > 2 and np.std(expected) > 0.01
    rows = torch.from_numpy(inputs.astype(np.float64))  # as most readers of files give them
    outputs = outputs_of_the_lines(model, rows, monkeypatch)
    np.testing.assert_allclose(outputs[:, 0], expected, rtol=1e-5, atol=1e-5)


def test_images_are_normalized_channel_by_channel_in_float64_too(monkeypatch, tmp_path):
    """The numbers are those of all training pixels; the README's last network is the factored."""
    monkeypatch.chdir(tmp_path)
    words = "--model FedSLR --model.network SmallCNN --model.network.width 4 --trainer.name a"
    words += " --trainer.max_epochs 1 --trainer.precision 64-true --data DigitsDataModule"
    words += " --data.num_clients 3 --data.transforms+=Normalize"
    words += " --model.low_rank_penalty 0.25 --model.proximal_step 1.0"
    status, _, error = call("fit", *words.split())
    assert status == 0, error
    export("--global", "--factored", "--out", tmp_path / "out")
    train = DigitsDataModule(3).load().train
    raw = train.gather(torch.arange(len(train)))[0].double()
    mean = float(f"{raw.mean().item():.4g}")
    deviation = float(f"{raw.std(correction=0).item():.4g}")
    network = SmallCNN(width=4).double().eval()
    network.load_state_dict(load_file(tmp_path / "out/global/model.safetensors"))
    with torch.no_grad():
        expected = network((raw[:50] - mean) / deviation).numpy()
    outputs = outputs_of_the_lines(tmp_path / "out/global", raw[:50], monkeypatch)
    np.testing.assert_allclose(outputs, expected, atol=1e-8)  # two thin layers round differently


@pytest.mark.slow
def test_the_onnx_graph_takes_raw_rows(folder, monkeypatch, tmp_path):
    from onnxruntime import InferenceSession

    monkeypatch.chdir(folder)
    export("--client", "all", "--format", "onnx", "--out", tmp_path)
    for client in range(3):
        model = tmp_path / f"client{client}"
        content = json.loads((model / "card.json").read_text("utf-8"))
        inputs, expected = raw_rows(folder, content, client)
        (outputs,) = InferenceSession(model / "model.onnx").run(None, {"inputs": inputs})
        np.testing.assert_allclose(outputs[:, 0], expected, rtol=1e-5, atol=1e-5)


def test_the_card_has_the_columns_and_the_statistics_that_were_used(folder, monkeypatch, tmp_path):
    """Means and deviations are those of the whole file, to four significant digits."""
    monkeypatch.chdir(folder)
    export("--client", "0", "--out", tmp_path)
    content = json.loads((tmp_path / "client0" / "card.json").read_text("utf-8"))
    used = content["input"]
    assert used["columns"] == COLUMNS
    values = np.array([[float(row[name]) for name in COLUMNS] for row in table(folder / "a.csv")])
    deviations = values.std(0)
    assert deviations[3] == 0
    deviations[3] = 1  # a constant column is divided by 1
    np.testing.assert_allclose(used["mean"], values.mean(0), rtol=5.1e-4)
    np.testing.assert_allclose(used["std"], deviations, rtol=5.1e-4)
    (transform,) = content["data"]["init_args"]["transforms"]
    assert transform["init_args"]["mean"] == used["mean"]
    assert transform["init_args"]["std"][:3] == used["std"][:3]


@pytest.mark.parametrize(
    ("name", "client"),
    [("Charité", 1), ("7", 0), ("2", 2)],  # "7" is no number of a client, and "2" no name
)
def test_clients_have_names_and_numbers(name, client, folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    assert sorted(HOSPITALS) == ["7", "Charité", "Köln"]
    export("--client", name, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"client{client}"]


def test_another_name_is_one_line_with_the_name_that_was_meant(folder, monkeypatch):
    monkeypatch.chdir(folder)
    words = ["--ckpt_path", "runs/a/checkpoints/last.ckpt", "--out", "out"]
    status, _, error = call("export", *words, "--client", "Charite")
    assert status == 2 and error.count("\n") == 1
    assert "--client: Charite; it must be a client's name, its number from 0 to 2, or all" in error
    assert "did you mean 'Charité'?" in error


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: re.sub(r"(?m)^1,.*\n", "", text), "it has no row of client 1"),
        (lambda text: text.replace("\n1,", "\none,"), "invalid literal for int"),
        (lambda text: re.sub(r"(?m)^(1,[^,]*),[^,]*", r"\1,many", text), "could not convert"),
    ],
)
def test_a_damaged_table_of_clients_is_one_line(change, reason, folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    path = Path("runs/a/clients.csv")
    text = path.read_text("utf-8")
    assert change(text) != text
    path.write_text(change(text), "utf-8")
    try:
        words = ["--ckpt_path", "runs/a/checkpoints/last.ckpt", "--client", "1"]
        status, _, error = call("export", *words, "--out", tmp_path / "out")
    finally:
        path.write_text(text, "utf-8")
    assert status == 2 and error.count("\n") == 1, error
    assert "clients.csv: it is damaged" in error and reason in error
    assert not (tmp_path / "out").exists()


def test_the_server_of_real_parties_does_not_know_their_statistics():
    data = RemoteData(2)
    shapes = {"input": ["float32", [3]], "target": ["int64", []]}
    data.connect(lambda: {0: {"sizes": [5, 0, 1], "classes": 2, **shapes}})
    content = card.samples_of(data, torch.zeros(1, 3))
    assert content == {"shape": [3], "dtype": "float32", "after": [card.PARTIES]}


def test_normalizations_are_one_and_other_transforms_come_before():
    """(x - 1) / 2 and then (y - 3) / 4 is (x - 7) / 8; a constant channel is divided by 1."""
    first = Apply(torch.nn.Identity())
    constant = Normalize([5.0], [1.0])
    constant.std = [0.0]  # as the statistics of constant data are
    chain = [first, Normalize([1.0], [2.0]), HorizontalFlip(), Normalize([3.0], [4.0])]
    used = normalization(Pipeline(chain))
    assert (used.mean, used.std, used.before) == ([7.0], [8.0], [first])
    used = normalization(Pipeline([constant]))
    assert (used.mean, used.std, used.before) == ([5.0], [1.0], [])
    used = normalization(Pipeline([Normalize([1.0], [2.0]), first]))
    assert used.mean is None and len(used.before) == 2


def test_gaps_are_filled_before_other_transforms_and_so_not_in_the_model(tmp_path):
    """The column has 1 and 3, and so 2 for a gap, which the transforms make 0 and then 1."""
    (tmp_path / "a.csv").write_text("x,y\n1,0\n3,1\n,1\n")
    more = Apply(torch.nn.Threshold(0.5, 1.0))
    given = {"num_clients": 1, "protocol": SplitOwn(0.0, 0.0), "missing": "mean"}
    for transforms in ([], [Normalize()], [Normalize(), more]):
        data = TableDataModule(tmp_path / "a.csv", "y", transforms=transforms, **given)
        data.setup()
        content = card.samples_of(data, torch.zeros(1, 1), 0)
        if more not in transforms:
            assert content["missing"] == gap_values(data, 0) == [2.0]
            assert "after" not in content
            continue
        assert "missing" not in content and gap_values(data, 0) is None
        used = list(map(repr, data.transforms.transforms))
        assert content["after"] == ["missing values as [2.0]", *used]
        index = torch.arange(3)
        inputs = data.transforms(data.samples.gather(index)[0], torch.zeros(3).long(), index)
        assert inputs[2].item() == 1.0


def test_a_clients_model_has_its_own_statistics_and_the_levels(tmp_path):
    """a has 1 and 3: mean 2, deviation 1. b has 10 and 30: mean 20, deviation 10."""
    (tmp_path / "a.csv").write_text("c,x,site,y\nr,1,a,0\ns,3,a,1\nr,10,b,0\ns,30,b,1\n")
    data = TableDataModule(
        tmp_path / "a.csv", "y", client_column="site", partition=Natural(), categories="codes",
        protocol=SplitOwn(0.0, 0.0), transforms=[Normalize(of="client")],
    )  # fmt: skip
    data.setup()
    contents = [card.samples_of(data, torch.zeros(1, 2), client) for client in (0, 1, None)]
    assert [content.get("mean") for content in contents] == [[0.5, 2.0], [0.5, 20.0], None]
    assert [content.get("std") for content in contents] == [[0.5, 1.0], [0.5, 10.0], None]
    assert contents[2]["after"] == ["Normalize(of='client')"]
    for content in contents:
        assert content["columns"] == ["c", "x"]
        assert content["levels"] == {"c": ["r", "s"]}
        assert content["conversions"] == ["'c': the levels are numbers, r = 0, s = 1"]


def test_the_levels_of_folders_are_no_levels_of_a_column(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for number in range(12):
        file = Path("images", "ab"[number % 2], "uv"[number // 6], f"{number}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(file)
    words = "--model LocalTrain --model.network SmallCNN --model.network.num_classes 2"
    words += " --model.network.in_channels 3 --trainer.name a --trainer.max_epochs 1"
    words += " --data ImageFolderDataModule --data.folder images --data.levels client/class"
    words += " --data.partition Natural"
    status, _, error = call("fit", *words.split())
    assert status == 0, error
    export("--client", "b", "--out", "out")
    assert "levels" not in json.loads(Path("out/client1/card.json").read_text("utf-8"))["input"]
    assert "Levels" not in Path("out/client1/README.md").read_text("utf-8")
