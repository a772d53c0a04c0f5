"""`pfl data`: what it shows of small files, whose content is written here."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests import leaf_files
from tests.cli.configurations import NETWORK, SMALL, changed, write
from tests.commands import call

pytestmark = pytest.mark.cli

ROWS = """age,blood,dose,site,y
30,A,0.5,007,ill
40,B,,007,well
50,A,1.5,7,ill
60,O,2.5,7,well
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text(ROWS)
    return tmp_path


def shown(*words):
    """The lines that the command prints, without repeated spaces."""
    status, out, err = call("data", *words)
    assert status == 0, err
    return [" ".join(line.split()) for line in out.splitlines()]


def test_a_table_as_it_is(folder):
    lines = shown("a.csv")
    assert lines[0] == "a.csv: 4 rows, 5 columns"
    assert lines[4:9] == [
        "age whole numbers 4 0 30 60 30, 40, 50",
        "blood text 3 0 A, B, A",
        "dose numbers 3 1 0.5 2.5 0.5, , 1.5",
        "site text of digits 2 0 7 7 007, 007, 7",
        "y text 2 0 ill, well, ill",
    ]
    assert lines[-1].startswith("--target_column COLUMN and --client_column COLUMN show")


@pytest.mark.parametrize("lists", [[[1, 2], [3, 4]], [[1, 2], [3]]])
def test_a_column_of_lists(lists, folder):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"scan": lists, "y": [0, 1]}), folder / "a.parquet")
    lines = shown("a.parquet")
    assert lines[4] == f"scan lists 2 0 {lists[0]}, {lists[1]}"


def test_a_table_as_a_network_gets_it(folder):
    words = "a.csv --target_column y --client_column site --categories one-hot --missing drop "
    words += "--protocol SplitOwn --protocol.test 0 --protocol.validation 0"
    lines = shown(*words.split())
    for line in (
        "Inputs: float32 [3, 4]",
        "age 30 46.667 60",
        "blood=A 0 0.66667 1",
        "dose 0.5 1.5 2.5",
        "Targets: 2 classes (samples): 0 = ill (2), 1 = well (1)",
        "007 1 0 0 1.00 0.333 0.333",
        "7 2 0 0 2.00 0.167 0.167",
        "client 007: age 30, blood=A 1, blood=O 0, dose 0.5 -> ill",
        "client 7: age 60, blood=A 0, blood=O 1, dose 2.5 -> well",
        "1 of 4 rows are left out, as they have no value in: 'dose' 1",
    ):
        assert any(line in one for one in lines), (line, lines)


def test_arrays_with_ids(folder):
    inputs = np.array([[0, 255], [51, 102]], np.uint8)[:, None, :, None]
    ids = np.array(["b", "a"])
    np.savez("a.npz", inputs=inputs, targets=np.array([1, 0]), client_ids=ids)
    lines = shown("a.npz", "--out", "look")
    assert "Inputs: uint8 [2, 1, 2, 1], from 0 to 255, mean 102" in lines
    assert "inputs: uint8 images, divided by 255" in lines
    assert "client a: [1, 2, 1] -> 0" in lines and "client b: [1, 2, 1] -> 1" in lines
    assert lines[-1] == "look/samples.png" and (folder / "look/samples.png").is_file()


def test_images_without_channels_and_classes_of_pixels(folder):
    targets = np.array([[[0, 1], [1, 1]], [[0, 255], [1, 1]]])
    np.savez("p.npz", inputs=np.zeros((2, 2, 2), np.uint8), targets=targets)
    lines = shown("p.npz", "--num_clients", "1", "--out", "look")
    line = "Targets: labels [2, 2, 2], from 0 to 255; classes (share): 0 (25.00%), 1 (62.50%), "
    assert line + "255 (12.50%)" in lines
    assert lines[-1] == "look/samples.png"
    with Image.open("look/samples.png") as picture:  # two rows: images, and classes of pixels
        assert picture.height > 0.7 * picture.width
    np.savez("two.npz", inputs=np.zeros((2, 2, 2, 2)), targets=[0, 1])
    line = "--out draws images only: inputs [2, 2, 2] are none with one or three channels."
    assert shown("two.npz", "--num_clients", "1", "--out", "look")[-1] == line


def test_a_folder_of_images(folder):
    for site, name in (("north", "cat"), ("south", "dog")):
        path = folder / "photos" / site / name
        path.mkdir(parents=True)
        Image.new("RGB", (4, 4), (255, 0, 0)).save(path / "1.png")
    lines = shown("photos", "--levels", "client/class")
    assert "Inputs: uint8 [2, 3, 4, 4], from 0 to 255, mean 85" in lines
    assert "Targets: 2 classes (samples): 0 = cat (1), 1 = dog (1)" in lines
    assert "client north: [3, 4, 4] -> cat" in lines
    assert lines[-1] == "--out FOLDER draws the samples."
    for column, expected in (("client", "client north: [3, 4, 4] -> ill"), ("ward", "client 0: ")):
        rows = ["north/cat/1.png,ill,north", "south/dog/1.png,ill,south"]
        Path("photos/clients.csv").write_text("\n".join([f"file,class,{column}", *rows]))
        lines = shown("photos", "--table=clients.csv")
        assert any(line.startswith(expected) for line in lines), lines


def test_any_data_module():
    lines = shown("--data", "DigitsDataModule", "--data.num_clients", "1")
    assert any(line.startswith("Inputs: ") and "[1,797, 1, 8, 8]" in line for line in lines)
    assert sum(line.startswith("client 0: [1, 8, 8] -> ") for line in lines) == 3


def test_a_run_whose_network_has_no_sizes_yet(folder):
    lacking = changed(SMALL, f"{NETWORK}.init_args", {"hidden": [8]})
    path = write(folder / "a.yaml", lacking)
    status, _, err = call("fit", "--config", path)
    assert (status, err) == (
        2,
        "error: model.network: MLP needs in_features; pfl data, with the same configuration, "
        "shows the inputs and the classes\n",
    )
    assert any("[1,797, 1, 8, 8]" in line for line in shown("--config", path))
    words = ("--config", path, "--model", "FedProx", "--model.lr", "fast", "--data.num_clients", 2)
    status, out, err = call("partition", *words)
    assert status == 0, err
    assert "2 clients" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "data: give a file, such as patients.csv, or --config quickstart"),
        ("none.csv", "data: none.csv: there is no such file"),
        ("a.txt", "data: a.txt; it must be a .csv, .parquet or .npz file, or a folder of images"),
        ("a.csv --target_column z", "TableDataModule.target_column: 'z'; it must be one of the"),
        ("a.csv --target y", "has no option 'target'"),
        ("a.csv --client_column site", "target_column"),
    ],
)
def test_a_mistake_gets_one_line(words, said, folder):
    status, _, err = call("data", *words.split())
    assert (status, err.count("\n")) == (2, 1) and said in err


def test_folders_of_leaf_and_hugging_face(folder):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    columns = {"x": [[0.5], [1.0]], "y": ["no", "yes"], "who": ["07", "7"]}
    datasets.Dataset.from_dict(columns).save_to_disk("saved")
    words = "saved --input_column x --target_column y --client_column who"
    words += " --protocol SplitOwn --protocol.test 0 --protocol.validation 0"
    lines = shown(*words.split())
    assert "client 07: 0.5 -> no" in lines and "client 7: 1 -> yes" in lines
    leaf_files.write(folder / "leaf", "femnist", "train", {"w1": (leaf_files.images(255), [3])})
    leaf_files.write(folder / "leaf", "femnist", "test", {"w1": (leaf_files.images(0), [4])})
    lines = shown("leaf", "--protocol", "OfficialSplit", "--protocol.validation", "0")
    assert "client w1: [1, 28, 28] -> 3" in lines
