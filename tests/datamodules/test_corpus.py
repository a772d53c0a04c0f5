"""Every file of the corpus is read as is written beside it, or refused in one line."""

import csv
import struct
import warnings
import zlib

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from datamodules import (
    ArrayDataModule,
    ConfigError,
    FEMNISTDataModule,
    HuggingFaceDataModule,
    ImageFolderDataModule,
    Natural,
    OfficialSplit,
    SplitOwn,
    TableDataModule,
)
from tests import leaf_files
from tests.datamodules import corpus


def rows_of(table):
    """Pairs of cells and what is expected, of a table of the corpus."""
    lines = [line for line in table.splitlines() if " -> " in line]
    pairs = [line.partition(" -> ") for line in lines]
    return [(first.rstrip(), last.strip()) for first, _, last in pairs]


def cells_of(words):
    return words.replace("\\\\", "\\").split(",")


def data_of(folder, columns, **options):
    """The data of a file with these columns, of which `y` is the target."""
    path = folder / "file.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    given = {"num_clients": 1, "protocol": SplitOwn(test=0.0, validation=0.0)}
    return TableDataModule(path, "y", **{**given, **options})


def refused(data, words):
    """Whether the data are refused in one line that holds these words."""
    with warnings.catch_warnings(), pytest.raises(ConfigError) as error:
        warnings.simplefilter("error")
        data.setup()
    assert words in str(error.value) and "\n" not in str(error.value)


def numbers(words):
    return pytest.approx([float(word) for word in words.split(",")], rel=1e-6)


def check_classes(data, expected):
    if expected[0] == "!":
        return refused(data, expected[1:])
    names, _, codes = expected.partition(" (")
    assert data.class_names == names.split(",")
    assert data.samples.targets.tolist() == [int(code) for code in codes[:-1].split(",")]


def plain(cells):
    """Other columns of a file with as many rows."""
    return {"x": range(len(cells)), "y": [number % 2 for number in range(len(cells))]}


@pytest.mark.parametrize(("words", "expected"), rows_of(corpus.CLIENTS))
def test_clients(words, expected, tmp_path):
    cells = cells_of(words)
    data = data_of(
        tmp_path, {**plain(cells), "site": cells}, client_column="site", partition=Natural(),
        num_clients=None,
    )  # fmt: skip
    if expected[0] == "!":
        return refused(data, expected[1:])
    names = cells_of(expected)
    assert data.client_names == names
    for client, name in enumerate(names):  # each has the rows that hold its name
        rows = [row for row, cell in enumerate(cells) if cell == name]
        assert data.partition.train[client].tolist() == rows


@pytest.mark.parametrize(("words", "expected"), rows_of(corpus.CLASSES))
def test_classes(words, expected, tmp_path):
    cells = cells_of(words)
    check_classes(data_of(tmp_path, {"x": range(len(cells)), "y": cells}), expected)


@pytest.mark.parametrize(("words", "expected"), rows_of(corpus.DECLARED_CLASSES))
def test_declared_classes(words, expected, tmp_path):
    cells = cells_of(words)
    columns = {"x": range(len(cells)), "y": cells}
    check_classes(data_of(tmp_path, columns, target_kind="classes"), expected)


@pytest.mark.parametrize(("words", "expected"), rows_of(corpus.VALUES))
def test_values(words, expected, tmp_path):
    kind = None
    if words[0] == "=":
        kind = "numbers"
    cells = cells_of(words.removeprefix("="))
    data = data_of(tmp_path, {"x": range(len(cells)), "y": cells}, target_kind=kind)
    if expected[0] == "!":
        return refused(data, expected[1:])
    assert data.num_classes is None
    assert data.samples.targets.tolist() == numbers(expected)


def check_inputs(data, expected):
    if expected[0] == "!":
        return refused(data, expected[1:])
    data.setup()
    assert data.samples.inputs[:, 0].tolist() == numbers(expected)


@pytest.mark.parametrize(("words", "expected"), rows_of(corpus.INPUTS))
def test_inputs(words, expected, tmp_path):
    cells = cells_of(words)
    check_inputs(data_of(tmp_path, {**plain(cells), "x": cells}), expected)


@pytest.mark.parametrize(
    ("rule", "words", "expected"),
    [
        *(("mean", *row) for row in rows_of(corpus.MEANS)),
        *(("drop", *row) for row in rows_of(corpus.DROPPED)),
    ],
)
def test_gaps(rule, words, expected, tmp_path):
    cells = cells_of(words)
    columns = {"x": cells, "y": [0, 1, 0, 1], "site": ["a", "a", "a", "b"]}
    data = data_of(
        tmp_path, columns, client_column="site", partition=Natural(), num_clients=None, missing=rule
    )
    check_inputs(data, expected)


@pytest.mark.parametrize("form", ["codes", "one-hot"])
@pytest.mark.parametrize(("words", "expected"), rows_of(corpus.LEVELS))
def test_levels(form, words, expected, tmp_path):
    cells = cells_of(words)
    data = data_of(tmp_path, {**plain(cells), "x": cells}, categories=form)
    if expected[0] == "!":
        return refused(data, expected[1:])
    names, _, codes = expected.partition(" (")
    levels = names.split(",")
    data.setup()
    assert data.category_levels == {"x": levels}
    wanted = [[int(code)] for code in codes[:-1].split(",")]
    if form == "one-hot":
        assert data.feature_names == [f"x={level}" for level in levels]
        wanted = [[int(code == k) for k in range(len(levels))] for (code,) in wanted]
    assert data.samples.inputs.tolist() == wanted


@pytest.mark.parametrize("name", corpus.FILES)
def test_files(name, tmp_path):
    content, expected = corpus.FILES[name]
    path = tmp_path / "file.csv"
    path.write_bytes(content)
    data = TableDataModule(path, "y", num_clients=1, protocol=SplitOwn(test=0.0, validation=0.0))
    if isinstance(expected, str):
        return refused(data, expected)
    data.setup()
    assert data.samples.inputs.tolist() == expected


EVERYTHING = SplitOwn(test=0.0, validation=0.0)


def parquet_of(folder, name, kind, values, **options):
    """The data of a Parquet file whose column `name` has a type of Arrow."""
    columns = {"x": pa.array([1.0, 2.0]), "y": pa.array([0, 1])}
    types = {"large_string": pa.large_string(), "null": pa.null(), "date32": pa.date32()}
    if kind == "timestamp[s]":
        types[kind] = pa.timestamp("s")
    if kind.startswith("decimal"):
        from decimal import Decimal

        types[kind] = pa.decimal128(5, 2)
        values = [Decimal(value) for value in values]
    if kind == "float16":
        values = np.array(values, np.float16)
    type_of = types.get(kind) or pa.type_for_alias(kind)
    columns[name] = pa.array(values, type=type_of)
    parquet.write_table(pa.table(columns), folder / "file.parquet")
    given = {"num_clients": 1, "protocol": EVERYTHING}
    return TableDataModule(folder / "file.parquet", "y", **{**given, **options})


@pytest.mark.parametrize(("kind", "values", "expected"), corpus.PARQUET_INPUTS)
def test_parquet_inputs(kind, values, expected, tmp_path):
    data = parquet_of(tmp_path, "x", kind, values)
    if isinstance(expected, str):
        return refused(data, expected)
    data.setup()
    assert data.samples.inputs.dtype == torch.float32
    assert data.samples.inputs[:, 0].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("kind", "values", "expected"), corpus.PARQUET_CLIENTS)
def test_parquet_clients(kind, values, expected, tmp_path):
    data = parquet_of(
        tmp_path, "site", kind, values, client_column="site", partition=Natural(),
        num_clients=None,
    )  # fmt: skip
    if isinstance(expected, str):
        return refused(data, expected)
    assert data.client_names == expected
    for client, name in enumerate(expected):
        rows = [row for row, value in enumerate(values) if str(value) == name]
        assert data.partition.train[client].tolist() == rows


@pytest.mark.parametrize(("kind", "values", "names", "targets"), corpus.PARQUET_TARGETS)
def test_parquet_targets(kind, values, names, targets, tmp_path):
    data = parquet_of(tmp_path, "y", kind, values)
    if isinstance(names, str):
        return refused(data, names)
    data.setup()
    assert (data.class_names, data.samples.targets.tolist()) == (names, targets)


@pytest.mark.parametrize(
    ("kind", "inputs", "target_kind", "targets", "ids", "batch", "read", "clients"), corpus.ARRAYS
)
def test_arrays(kind, inputs, target_kind, targets, ids, batch, read, clients, tmp_path):
    arrays = {"inputs": np.array(inputs, kind), "targets": np.array(targets, target_kind)}
    given = {"num_clients": 1}
    if ids is not None:
        arrays["client_ids"] = np.array(ids)
        given = {"partition": Natural()}
    np.savez(tmp_path / "file.npz", **arrays)
    data = ArrayDataModule(file=tmp_path / "file.npz", protocol=EVERYTHING, **given)
    if isinstance(batch, str):
        return refused(data, batch)
    data.setup()
    got, goals = data.samples.gather(torch.arange(len(targets)))
    assert np.allclose(got.numpy(), np.array(batch), rtol=1e-6, atol=0)
    assert goals.tolist() == read
    assert data.client_names == clients
    for client, name in enumerate(clients or ()):
        rows = [row for row, one in enumerate(ids) if str(one) == name]
        assert data.partition.train[client].tolist() == rows


@pytest.mark.parametrize(("levels", "images", "classes", "clients"), corpus.FOLDERS)
def test_folders(levels, images, classes, clients, tmp_path):
    for name, level in images.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if level is None:
            path.write_bytes(b"no image")
        elif path.suffix == ".txt":
            path.write_text("no image")
        else:
            Image.new("L", (8, 8), level).save(path)
    data = ImageFolderDataModule(tmp_path, levels, num_clients=1, protocol=EVERYTHING)
    if isinstance(classes, str):
        return refused(data, classes)
    loaded = data.load()
    assert [loaded.class_names[k] for k in loaded.train.targets.tolist()] == classes
    ids = loaded.client_ids
    if ids is not None:
        ids = ids.tolist()
    assert ids == clients
    found = sorted(level for image in loaded.train.inputs for level in image.unique().tolist())
    assert found == sorted(images.values())


@pytest.mark.parametrize(("rule", "inputs", "expected", "clients", "said"), corpus.ARRAY_GAPS)
def test_gaps_of_arrays(rule, inputs, expected, clients, said, tmp_path):
    arrays = {"inputs": np.array(inputs), "targets": [0, 1, 0, 1], "client_ids": [*"aaab"]}
    np.savez(tmp_path / "file.npz", **arrays)
    data = ArrayDataModule(
        file=tmp_path / "file.npz", partition=Natural(), protocol=EVERYTHING, missing=rule
    )
    if isinstance(expected, str):
        return refused(data, expected)
    data.setup()
    assert data.samples.inputs.tolist() == expected
    owners = sorted(
        (sample, name)
        for client, name in enumerate(data.client_names)
        for sample in data.partition.train[client].tolist()
    )
    assert "".join(name for _, name in owners) == clients
    assert said in " ".join(data.conversions)
    assert bool(said) == bool(data.conversions)


def png(bits, channels):
    """The bytes of a PNG file of 4x4 pixels of one colour; Pillow writes no 16 bits a channel."""

    def chunk(name, content):
        crc = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + crc

    kind = {1: 0, 2: 4, 3: 2, 4: 6}[len(channels)]
    pixel = b"".join(value.to_bytes(bits // 8, "big") for value in channels)
    rows = (b"\0" + pixel * 4) * 4
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, bits, kind, 0, 0, 0))]
    parts += [chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(("bits", "channels", "colour", "expected", "said"), corpus.PICTURES)
def test_pictures(bits, channels, colour, expected, said, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(png(bits, channels))
    data = ImageFolderDataModule(
        tmp_path, "class", colour=colour, num_clients=1, protocol=EVERYTHING
    )
    data.setup()
    inputs = data.samples.gather(torch.tensor([0]))[0][0]
    assert inputs.shape == (len(expected), 4, 4)
    values = torch.tensor(expected)[:, None, None].expand(-1, 4, 4)
    torch.testing.assert_close(inputs, values, rtol=0, atol=1e-7)
    assert f"2 of 2 images: {said}" in data.conversions


def test_files_that_are_no_images_are_told(tmp_path):
    (tmp_path / "a").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "a" / "1.png")
    Image.new("L", (4, 4)).save(tmp_path / "a" / "2.gif")
    (tmp_path / "a" / ".DS_Store").write_text("of a Mac")
    data = ImageFolderDataModule(tmp_path, "class", num_clients=1, protocol=EVERYTHING)
    data.setup()
    assert len(data.samples) == 1
    (line,) = [line for line in data.conversions if line.startswith("files left out")]
    assert line.endswith(": 1, first 'a/2.gif'")


@pytest.mark.parametrize(("writers", "expected"), corpus.LEAF)
def test_leaf(writers, expected, tmp_path):
    for split, place in (("train", 0), ("test", 2)):
        users = {
            name: (leaf_files.images(*parts[place]), parts[place + 1])
            for name, parts in writers.items()
        }
        leaf_files.write(tmp_path, "femnist", split, users)
    data = FEMNISTDataModule(root=tmp_path, protocol=OfficialSplit(validation=0.0))
    if isinstance(expected, str):
        return refused(data, expected)
    assert data.client_names == expected
    for client, name in enumerate(expected):
        levels, classes, test_levels, test_classes = writers[name]
        own = data.client(client)
        for index, grays, goals in (
            (own.train, levels, classes),
            (own.test, test_levels, test_classes),
        ):
            assert data.samples.inputs[index][:, 0, 0, 0].tolist() == grays
            assert data.samples.targets[index].tolist() == goals


@pytest.mark.parametrize(
    ("ids", "classes", "inputs", "clients", "names", "targets"), corpus.HUGGING_FACE
)
def test_hugging_face(ids, classes, inputs, clients, names, targets, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_dict({"input": inputs, "target": classes, "client": ids})
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "set"))
    data = HuggingFaceDataModule(
        str(tmp_path / "set"), "input", "target", "client", partition=Natural(), protocol=EVERYTHING
    )
    if isinstance(clients, str):
        return refused(data, clients)
    assert data.client_names == clients
    assert (data.class_names, data.samples.targets.tolist()) == (names, targets)
    assert data.samples.inputs.tolist() == inputs
    for client, name in enumerate(clients):
        rows = [row for row, one in enumerate(ids) if str(one) == name]
        assert data.partition.train[client].tolist() == rows


def test_the_corpus_has_300_files():
    tables = (corpus.CLIENTS, corpus.CLASSES, corpus.DECLARED_CLASSES, corpus.VALUES)
    tables += (corpus.INPUTS, corpus.MEANS, corpus.DROPPED, corpus.LEVELS)
    lists = (corpus.FILES, corpus.PARQUET_INPUTS, corpus.PARQUET_CLIENTS, corpus.PARQUET_TARGETS)
    lists += (corpus.ARRAYS, corpus.FOLDERS, corpus.ARRAY_GAPS, corpus.PICTURES, corpus.LEAF)
    lists += (corpus.HUGGING_FACE,)
    files = sum(len(rows_of(table)) for table in tables) + sum(map(len, lists))
    assert files >= 300, files
