"""Data sets of Hugging Face's package `datasets`, in memory and in files, without the hub."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import HuggingFaceDataModule, MappedSamples, Natural, OfficialSplit, SplitOwn
from pfl.datamodules.sources import hugging_face as module
from pfl.datamodules.sources.tokens import encoder

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()


def picture(value, mode="L", size=(5, 4)):
    """An image of one colour."""
    return Image.new(mode, size, value if mode == "L" else (value, 0, 255))


IMAGES = {
    "picture": [picture(10 * i) for i in range(6)],
    "label": ["cat", "dog", "cat", "cat", "dog", "ape"],
    "who": ["ann", "bob", "bob", "ann", "cat", "ann"],
}


def saved(folder, **splits):
    """Writes tables with `save_to_disk`; returns the folder."""
    tables = {name: datasets.Dataset.from_dict(columns) for name, columns in splits.items()}
    datasets.DatasetDict(tables).save_to_disk(str(folder))
    return str(folder)


def test_images_classes_and_clients_of_a_saved_data_set(tmp_path):
    data = HuggingFaceDataModule(
        saved(tmp_path / "set", train=IMAGES),
        "picture",
        "label",
        "who",
        partition=Natural(),
        protocol=SplitOwn(0.0, 0.0),
    )
    inputs = data.samples.inputs
    assert inputs.dtype == torch.uint8 and inputs.shape == (6, 1, 4, 5)
    assert inputs[:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40, 50]
    assert data.class_names == ["ape", "cat", "dog"]
    assert data.samples.targets.tolist() == [1, 2, 1, 1, 2, 0]
    assert [data.partition.train[i].tolist() for i in range(3)] == [[0, 3, 5], [1, 2], [4]]


def test_a_parquet_file_gives_the_same_as_memory(tmp_path):
    """Whole numbers of a ClassLabel keep their values, and the test split has ids of its own."""
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "label": datasets.ClassLabel(names=["zebra", "ape"]),
            "who": datasets.Value("int64"),
        }
    )
    train = {"picture": [picture(7, "RGB")] * 4, "label": [0, 1, 1, 0], "who": [5, 5, 3, 3]}
    test = {"picture": [picture(9, "RGB")] * 2, "label": [1, 0], "who": [3, 5]}
    files = {}
    for split, columns in (("train", train), ("test", test)):
        files[split] = str(tmp_path / f"{split}.parquet")
        datasets.Dataset.from_dict(columns, features).to_parquet(files[split])
    arguments = dict(data_files=files, test_split="test", root=tmp_path, partition=Natural())
    data = HuggingFaceDataModule(
        "parquet", "picture", "label", "who", protocol=OfficialSplit(0.0), **arguments
    )
    assert data.samples.targets.tolist() == [0, 1, 1, 0, 1, 0]
    assert data.class_names == ["zebra", "ape"]
    pixels = torch.tensor([[7, 0, 255]] * 4 + [[9, 0, 255]] * 2, dtype=torch.uint8)
    assert torch.equal(data.samples.inputs, pixels[:, :, None, None].expand(6, 3, 4, 5))
    parts = data.partition  # client 0 is the person 3
    assert [parts.train[i].tolist() for i in (0, 1)] == [[2, 3], [0, 1]]
    assert [parts.test[i].tolist() for i in (0, 1)] == [[4], [5]]
    data.prepare_data()  # a second time, from what the first time has converted
    assert (tmp_path / "huggingface").is_dir()


@pytest.mark.parametrize("place", [0, 1])
def test_a_row_without_an_image_is_named(place, tmp_path, one_line):
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.Value("int64")})
    pictures = [picture(1), picture(2), picture(3)]
    pictures[place] = None
    table = datasets.Dataset.from_dict({"picture": pictures, "label": [0, 1, 1]}, features)
    table.save_to_disk(str(tmp_path / "set"))
    for mode in (None, "RGB"):
        data = HuggingFaceDataModule(
            str(tmp_path / "set"), "picture", "label", image_mode=mode, num_clients=1
        )
        with one_line("HuggingFaceDataModule.input_column: the row", f"{place} has no image"):
            data.setup()


def test_images_take_the_size_and_the_mode_asked_for(tmp_path, one_line):
    mixed = {"picture": [picture(1), picture(2, "RGB", (6, 6))], "label": [0, 1]}
    path = saved(tmp_path / "set", train=mixed)
    arguments = {"num_clients": 1, "protocol": SplitOwn(0.0, 0.0)}
    data = HuggingFaceDataModule(
        path, "picture", "label", image_mode="RGB", image_size=3, **arguments
    )
    expected = torch.tensor([[1, 1, 1], [2, 0, 255]], dtype=torch.uint8)
    assert torch.equal(data.samples.inputs, expected[:, :, None, None].expand(2, 3, 3, 3))
    with one_line("image_mode: None", "gray images and images in colour; it must be L or RGB"):
        HuggingFaceDataModule(path, "picture", "label", image_size=3, **arguments).setup()
    with one_line(
        "image_size: None", "the images 0 and 1 have the shapes 1x4x5 and 1x6x6; it must be"
    ):
        HuggingFaceDataModule(path, "picture", "label", image_mode="L", **arguments).setup()


def test_images_are_decoded_once_into_a_cache(tmp_path, monkeypatch):
    path = saved(tmp_path / "set", train=IMAGES, test=IMAGES)
    arguments = {"num_clients": 2, "test_split": "test", "cache": tmp_path / "cache"}
    HuggingFaceDataModule(path, "picture", "label", **arguments).prepare_data()
    monkeypatch.setattr(module, "_image", lambda *args: 1 / 0)  # nothing is decoded any more
    data = HuggingFaceDataModule(path, "picture", "label", **arguments)
    assert isinstance(data.samples, MappedSamples) and len(data.samples) == 12
    assert data.samples.inputs[:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40, 50] * 2
    assert len(list((tmp_path / "cache").iterdir())) == 1


def lengths_of_words(text):
    """A tokenizer: the length of each word."""
    return [len(word) for word in text.split()]


def test_text_is_cut_into_tokens(tmp_path):
    lines = [{"text": "Hé you", "stars": 4.5}, {"text": "a", "stars": 0.5}]
    (tmp_path / "reviews.json").write_text("\n".join(map(json.dumps, lines)))
    arguments = {
        "path": "json",
        "input_column": "text",
        "target_column": "stars",
        "data_files": str(tmp_path / "reviews.json"),
        "root": tmp_path,
        "num_clients": 1,
    }
    data = HuggingFaceDataModule(**arguments, length=4)
    # H is the byte 72, é is 195 and 169, a blank is 32, a is 97; one is added to each.
    assert data.samples.inputs.tolist() == [[73, 196, 170, 33], [98, 0, 0, 0]]
    assert data.samples.inputs.dtype == torch.int64
    assert data.samples.targets.dtype == torch.float32 and data.num_classes is None
    data = HuggingFaceDataModule(**arguments, length=3, tokenizer=lengths_of_words)
    assert data.samples.inputs.tolist() == [[2, 3, 0], [1, 0, 0]]


def test_numbers_and_lists_of_numbers(tmp_path):
    columns = {
        "age": [1, 2],
        "signal": [[0.5, 1.5, 2.5], [3.0, 4.0, 5.0]],
        "tokens": [[3, 1], [2, 2]],
        "healthy": [True, False],
    }
    path = saved(tmp_path / "set", train=columns)
    expected = {
        "age": torch.tensor([[1], [2]]),
        "signal": torch.tensor([[0.5, 1.5, 2.5], [3.0, 4.0, 5.0]]),
        "tokens": torch.tensor([[3, 1], [2, 2]]),
    }
    for column, inputs in expected.items():
        data = HuggingFaceDataModule(path, column, "healthy", num_clients=1)
        assert data.samples.inputs.dtype == inputs.dtype
        assert torch.equal(data.samples.inputs, inputs)
        assert data.samples.targets.tolist() == [1, 0]


def test_a_tokenizer_of_the_hub(tmp_path):
    """A vocabulary of words, in the format of the hub's tokenizers; padding has the number 2."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"[UNK]": 0, "so": 1, "[PAD]": 2, "cool": 3}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encode = encoder(str(tmp_path / "tokenizer.json"), 4)
    assert encode("so very cool") == [1, 0, 3, 2]
    assert encode("so so so so cool") == [1, 1, 1, 1]


def test_mistakes_are_named(tmp_path, one_line, monkeypatch):
    def load(*args, **kwargs):
        HuggingFaceDataModule(*args, **{"num_clients": 1, "root": tmp_path, **kwargs}).setup()

    path = saved(tmp_path / "set", train=IMAGES, more={**IMAGES, "who": [None, *"abcde"]})
    with one_line(
        "HuggingFaceDataModule.input_column: 'image'", "columns, which are picture, label"
    ):
        load(path, "image", "label")
    with one_line("HuggingFaceDataModule.client_column: 'w'", "columns, which are picture, label"):
        load(path, "picture", "label", "w")
    with one_line("HuggingFaceDataModule.test_split: 'test'; it must be one of train, more"):
        load(path, "picture", "label", test_split="test")
    with one_line("the column 'who' has rows without a value"):
        load(path, "picture", "label", "who", train_split="more", partition=Natural())
    ragged = saved(tmp_path / "ragged", train={"x": [[1], [1, 2]], "y": [0, 1]})
    with one_line("input_column: the column 'x' holds List", "lists of numbers of one shape"):
        load(ragged, "x", "y")
    with one_line(
        "HuggingFaceDataModule.path: 'csv' cannot be loaded", "csv or json with data_files"
    ):
        load("csv", "x", "y", data_files=str(tmp_path / "missing.csv"))
    texts = saved(tmp_path / "texts", train={"x": ["a", "b"], "y": [0, 1]})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with one_line("tokenizer: 'no/such' cannot be loaded", "pip install tokenizers"):
        load(texts, "x", "y", tokenizer="no/such")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with one_line("the package datasets must be installed, by: pip install datasets"):
        load(path, "picture", "label")


def test_nothing_is_printed_before_an_error(tmp_path, one_line, capfd):
    datasets.enable_progress_bars()
    (tmp_path / "t.csv").write_text("a,y\n1,0\n2,1\n")
    files = {"data_files": str(tmp_path / "t.csv"), "root": tmp_path, "num_clients": 1}
    with one_line("HuggingFaceDataModule.target_column: 'label'"):
        HuggingFaceDataModule("csv", "a", "label", **files).setup()
    with one_line("HuggingFaceDataModule.path: 'parquet' cannot be loaded"):
        HuggingFaceDataModule("parquet", "a", "y", **files).setup()
    assert capfd.readouterr() == ("", "")
    assert datasets.is_progress_bar_enabled()


def test_an_empty_text_is_an_input_but_neither_a_class_nor_a_client(tmp_path, one_line):
    table = {"text": ["", "b", "c"], "label": ["x", "", "y"], "who": ["ann", "bob", ""]}
    path = saved(tmp_path / "set", train=table | {"number": [0, 1, 0]})
    HuggingFaceDataModule(path, "text", "number", num_clients=1).setup()
    for arguments in (("label",), ("number", "who")):
        with one_line(f"the column {arguments[-1]!r} has rows without a value"):
            HuggingFaceDataModule(path, "text", *arguments, num_clients=1).setup()


@pytest.mark.parametrize(
    ("ids", "targets", "names", "classes"),
    [
        (["7", "12", "7"], ["3", "0", "1"], ["7", "12"], None),
        (["7", "007", "12"], ["07", "7", "7"], ["007", "12", "7"], ["07", "7"]),
        (["02134", "2134", "90210"], ["b", "a", "b"], ["02134", "2134", "90210"], ["a", "b"]),
        (["1e2", "100", "100.0"], ["1", "2", "3"], ["100", "100.0", "1e2"], None),
    ],
)
def test_ids_and_classes_of_a_csv_file_are_its_text(ids, targets, names, classes, tmp_path):
    rows = [f"{i},{site},{y}" for i, (site, y) in enumerate(zip(ids, targets, strict=True))]
    (tmp_path / "a.csv").write_text("\n".join(["x,site,y", *rows, ""]))
    data = HuggingFaceDataModule(
        "csv", "x", "y", "site", data_files=str(tmp_path / "a.csv"), root=tmp_path,
        partition=Natural(), protocol=SplitOwn(0.0, 0.0),
    )  # fmt: skip
    assert data.client_names == names
    owned = [[i for i, site in enumerate(ids) if site == name] for name in names]
    assert [data.partition.train[i].tolist() for i in range(len(names))] == owned
    assert data.class_names == classes
    expected = [int(y) if classes is None else classes.index(y) for y in targets]
    assert data.samples.targets.tolist() == expected


def test_floating_targets_and_gaps_of_a_csv_file(tmp_path, one_line):
    def read(target, site="1", name="a"):
        (tmp_path / f"{name}.csv").write_text(f"x,site,y\n1,2,0.25\n2,{site},{target}\n")
        return HuggingFaceDataModule(
            "csv", "x", "y", "site", data_files=str(tmp_path / f"{name}.csv"), root=tmp_path,
            partition=Natural(),
        )  # fmt: skip

    data = read("1e1")
    assert data.samples.targets.dtype == torch.float32
    assert data.samples.targets.tolist() == [0.25, 10.0]
    with one_line("the column 'y' has rows without a value"):
        read("NA", name="b").setup()
    with one_line("the column 'site' has rows without a value"):
        read("1.5", "None", name="c").setup()


@pytest.mark.parametrize(("mode", "channels"), [(None, 1), ("L", 1), ("RGB", 3)])
def test_pixels_of_16_bits_keep_their_values(mode, channels, tmp_path, one_line):
    """1000 and 60000 are 1000 / 257 = 3.891 and 60000 / 257 = 233.463 on the scale of 8 bits."""
    images = [Image.fromarray(np.full((4, 5), value, np.uint16)) for value in (1000, 60000)]
    folder = saved(tmp_path / "set", train={"picture": images, "label": [0, 1]})
    data = HuggingFaceDataModule(folder, "picture", "label", image_mode=mode, num_clients=1)
    inputs, _ = data.samples.gather(torch.arange(2))
    assert inputs.shape == (2, channels, 4, 5)
    assert (inputs[0] * 255 - 3.891).abs().max() < 5e-4
    assert (inputs[1] * 255 - 233.463).abs().max() < 5e-4
    real = Image.fromarray(np.full((4, 5), 0.5, np.float32))
    folder = saved(tmp_path / "real", train={"picture": [real], "label": [0]})
    data = HuggingFaceDataModule(folder, "picture", "label", image_mode=mode, num_clients=1)
    with one_line("HuggingFaceDataModule: the image 0: ", "mode F)", "must have 8 or 16 bits"):
        data.setup()


def test_what_is_changed_is_told(tmp_path):
    """Of the texts "abc", "é" and "abcd", of 3, 2 and 4 bytes, one is longer than 3."""
    columns = {"text": ["abc", "é", "abcd"], "x": [0.5, 1.0, 2.0], "y": [0, 1, 0]}
    folder = saved(tmp_path / "set", train=columns)
    texts = HuggingFaceDataModule(folder, "text", "y", length=3, num_clients=1)
    texts.setup()
    said = "'text': texts become 3 whole numbers, the bytes in UTF-8 plus 1; longer ones are cut, "
    assert texts.conversions == [f"{said}1 of 3, and 0 follows shorter ones"]
    numbers = HuggingFaceDataModule(folder, "x", "y", num_clients=1)
    numbers.setup()
    assert numbers.conversions == ["'x': float64 is read as float32, with 7 digits"]
    columns = {"image": [picture(0), picture(1)], "y": [0, 1]}
    folder = saved(tmp_path / "images", train=columns)
    images = HuggingFaceDataModule(folder, "image", "y", image_size=4, num_clients=1)
    images.setup()
    said = "images are read in the mode L, 8 bits divided by 255 and 16 by 65,535"
    assert images.conversions == [f"{said}, and resized to 4x4"]
