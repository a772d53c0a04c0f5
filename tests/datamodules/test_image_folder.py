"""Images in folders and in tables, written here with known pixels."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import to_pil_image

from datamodules import IID, ImageFolderDataModule, SharedTest, SplitOwn


def write(folder, images):
    """Writes images by path: a colour (of 6x4 pixels), a gray level, or an array [H, W, 3]."""
    for path, pixels in images.items():
        if isinstance(pixels, tuple | int):
            pixels = np.full((6, 4, 3) if isinstance(pixels, tuple) else (6, 4), pixels, np.uint8)
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        to_pil_image(torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)).save(
            file
        )


COLOURS = {
    "photo/dog/b.png": (1, 2, 3),
    "photo/cat/a.bmp": (4, 5, 6),
    "sketch/cat/c.PNG": 7,  # gray
    "sketch/cat/d.png": (8, 9, 10),
}
# In the order of the paths: class (cat 0, dog 1), client and colour.
EXPECTED = [
    (0, "photo", (4, 5, 6)),
    (1, "photo", (1, 2, 3)),
    (0, "sketch", (7, 7, 7)),
    (0, "sketch", (8, 9, 10)),
]


def rows(samples, ids):
    """Class, client and colour of each image, all of whose pixels are equal."""
    found = []
    for image, target, client in zip(samples.inputs, samples.targets.tolist(), ids, strict=True):
        assert image.shape == (3, 6, 4) and image.dtype == torch.uint8
        (colour,) = {tuple(pixel) for pixel in image.flatten(1).T.tolist()}
        found.append((target, client, colour))
    return found


def test_folders_are_clients_and_classes(tmp_path):
    write(tmp_path, COLOURS)
    (tmp_path / "photo" / "notes.txt").write_text("no image")
    data = ImageFolderDataModule(tmp_path, "client/class", protocol=SplitOwn(0.0, 0.0))
    loaded = data.load()
    assert rows(loaded.train, loaded.client_ids) == EXPECTED
    assert loaded.test is None
    assert data.class_names == ["cat", "dog"]
    assert (data.num_clients, data.client_sizes.tolist()) == (2, [2, 2])
    assert data.label_counts().tolist() == [[1, 1], [2, 0]]


@pytest.mark.parametrize(
    "levels", [None, "class/client", "split/class", "split/class/client", "client/split/class"]
)
def test_levels_have_any_order(levels, tmp_path):
    """The last image is a test image, where there are splits."""
    names = (levels or "class").split("/")
    for path, colour in COLOURS.items():
        client, label, name = path.split("/")
        parts = {"client": client, "class": label, "split": "test" if "d." in name else "train"}
        write(tmp_path, {"/".join([*(parts[level] for level in names), name]): colour})
    loaded = ImageFolderDataModule(tmp_path, levels, num_clients=1).load()
    ids = [None] * 4 if loaded.client_ids is None else loaded.client_ids.tolist()
    number = len(loaded.train)
    found = rows(loaded.train, ids[:number])
    expected = [(label, c if "client" in names else None, colour) for label, c, colour in EXPECTED]
    if "split" in names:
        assert rows(loaded.test, ids[number:]) == expected[3:]
        expected = expected[:3]
    else:
        assert loaded.test is None
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_a_table_names_class_client_and_split(tmp_path, one_line):
    write(tmp_path, COLOURS)
    lines = ["file,class,client,split,age", "sketch/cat/c.PNG,b,ann,test,3"]
    lines += ["photo/dog/b.png,c,bob,train,4", "photo/cat/a.bmp,b,ann,train,5"]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    settings = {"table": "list.csv", "protocol": SharedTest(validation=0.0)}
    data = ImageFolderDataModule(tmp_path, **settings)
    loaded = data.load()
    assert rows(loaded.train, loaded.client_ids[:2]) == [
        (1, "bob", (1, 2, 3)),
        (0, "ann", (4, 5, 6)),
    ]
    assert rows(loaded.test, loaded.client_ids[2:]) == [(0, "ann", (7, 7, 7))]
    assert data.client_names == ["ann", "bob"]
    assert data.client_sizes.tolist() == [1, 1]
    assert ImageFolderDataModule(tmp_path, num_clients=1, **settings).client_names is None
    (tmp_path / "list.csv").write_text("file,class\nphoto/dog/b.png,client")
    for arguments in (settings, {}, {"levels": "split/class"}):
        with one_line("ImageFolderDataModule.num_clients: None; it must be a whole number"):
            ImageFolderDataModule(tmp_path, **arguments)


def test_images_are_resized_to_squares(tmp_path):
    ramp = np.zeros((6, 6, 3), np.uint8) + np.arange(0, 60, 10, np.uint8)[:, None, None]
    write(tmp_path, {"a/1.png": (9, 8, 7), "a/2.png": ramp})
    loaded = ImageFolderDataModule(tmp_path, image_size=3, num_clients=1).load()
    assert loaded.train.inputs.shape == (2, 3, 3, 3)
    assert (loaded.train.inputs[0] == torch.tensor([9, 8, 7])[:, None, None]).all()
    # Each pixel is a mean around the middle of two rows; in the middle of a ramp this is exact.
    assert loaded.train.inputs[1, :, 1].tolist() == [[25] * 3] * 3


def test_mistakes_are_named(tmp_path, one_line):
    def load(*args, **kwargs):
        ImageFolderDataModule(*args, **{"num_clients": 1, "partition": IID(), **kwargs}).setup()

    missing = tmp_path / "missing"
    with one_line(f"folder: '{missing}' is not a folder", "images at <client>/<class>/<image>"):
        load(missing, "client/class")
    (tmp_path / "empty").mkdir()
    with one_line("holds no images", "<class>/<image>"):
        load(tmp_path / "empty")
    with one_line(
        "ImageFolderDataModule.levels: 'class/class'; it must be one of class, client/class"
    ):
        load(tmp_path, "class/class")
    with one_line("levels: 'class'; it must be None, as there is a table"):
        load(tmp_path, "class", table="list.csv")
    with one_line("image_size: 0; it must be a whole number"):
        load(tmp_path, image_size=0)

    write(tmp_path / "set", COLOURS)
    with one_line("levels: 'class', but there is", "cat/a.bmp'", "at <class>/<image>"):
        load(tmp_path / "set")
    write(tmp_path / "split", {"val/a/1.png": 3})
    with one_line("the split of", "val/a/1.png: 'val'; it must be train or test"):
        load(tmp_path / "split", "split/class")
    write(tmp_path / "tests", {"test/a/1.png": 3})
    with one_line("holds test images only"):
        load(tmp_path / "tests", "split/class")
    write(tmp_path / "sizes", {"a/1.png": 3, "a/2.png": np.zeros((5, 7, 3), np.uint8)})
    with one_line("image_size: None", "2.png have the shapes 3x6x4 and 3x5x7"):
        load(tmp_path / "sizes")
    (tmp_path / "set" / "photo" / "cat" / "a.bmp").write_bytes(b"BM")
    with one_line("a.bmp: cannot be read as an image"):
        load(tmp_path / "set", "client/class")

    table = tmp_path / "set" / "list.csv"
    with one_line("table: '", "list.csv'; it must be an existing CSV file"):
        load(tmp_path / "set", table="list.csv")
    table.write_text("path,class\na.png,b")
    with one_line("has the columns path, class; it must have the columns file and class"):
        load(tmp_path / "set", table="list.csv")
    table.write_text("file,class\na.png,b")
    with one_line("list.csv' names", "a.png', which does not exist"):
        load(tmp_path / "set", table="list.csv")


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        (b"a.png,cat,\n", ["line 2 has no client"]),
        (b"a.png,,ann\n", ["line 2 has no class"]),
        (b"a.png,cat,ann\na.png,cat,bob\n", ["a.png' twice"]),
        (b"a.png,cat, black,ann\n", ["line 2 has 4 cells instead of 3"]),
        (b"a.png,cat,J\xf6rg\n", ["saved as UTF-8"]),
    ],
)
def test_damaged_rows_of_a_table_are_refused(rows, parts, tmp_path, one_line):
    (tmp_path / "a.png").touch()
    (tmp_path / "t.csv").write_bytes(b"file,class,client\n" + rows)
    with one_line("ImageFolderDataModule.table: ", "t.csv", *parts):
        ImageFolderDataModule(tmp_path, table="t.csv", num_clients=1).setup()


def depths(folder, images):
    """Writes images by path: an array [H, W] of uint16, uint8, int32 or float32."""
    for path, pixels in images.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".pgm"):  # Pillow reads it as 32 bits
            height, width = pixels.shape
            head = f"P5 {width} {height} 65535\n".encode()
            (folder / path).write_bytes(head + pixels.astype(">u2").tobytes())
        else:
            Image.fromarray(pixels).save(folder / path)


def of_16_bits(value, dtype=np.uint16):
    return np.full((8, 8), value, dtype)


@pytest.mark.parametrize(
    ("suffix", "dtype"), [(".png", "<u2"), (".tif", "<u2"), (".tiff", ">u2"), (".pgm", "<u2")]
)
@pytest.mark.parametrize("size", [None, 4])
def test_pixels_of_16_bits_keep_their_values(suffix, dtype, size, tmp_path):
    """1000 and 60000 are 1000 / 257 = 3.891 and 60000 / 257 = 233.463 on the scale of 8 bits."""
    dark, bright = of_16_bits(1000, dtype), of_16_bits(60000, dtype)
    depths(tmp_path, {f"a/1{suffix}": dark, f"b/2{suffix}": bright})
    data = ImageFolderDataModule(tmp_path, image_size=size, num_clients=1)
    inputs, targets = data.samples.gather(torch.arange(2))
    assert inputs.shape == (2, 3, size or 8, size or 8) and targets.tolist() == [0, 1]
    assert (inputs[0] * 255 - 3.891).abs().max() < 5e-4
    assert (inputs[1] * 255 - 233.463).abs().max() < 5e-4


def test_16_bits_and_8_bits_have_one_scale(tmp_path):
    """257 v with 16 bits is v with 8 bits, to the last digit."""
    ramp = np.arange(256, dtype=np.uint16).reshape(16, 16)
    depths(tmp_path / "deep", {"a/1.png": 257 * ramp})
    depths(tmp_path / "flat", {"a/1.png": ramp.astype(np.uint8)})
    deep, flat = (
        ImageFolderDataModule(tmp_path / name, num_clients=1).samples.gather(torch.arange(1))[0]
        for name in ("deep", "flat")
    )
    assert torch.equal(deep, flat)


def test_resized_pixels_of_16_bits_stay_between_black_and_white(tmp_path):
    edges = np.zeros((8, 8), np.uint16)
    edges[:, 4:] = 65535  # bicubic interpolation goes beyond both
    depths(tmp_path, {"a/1.png": edges})
    data = ImageFolderDataModule(tmp_path, image_size=16, num_clients=1)
    inputs, _ = data.samples.gather(torch.arange(1))
    assert (inputs.min(), inputs.max()) == (0, 1)


def test_images_of_unknown_scale_are_refused(tmp_path, one_line):
    for name, values in {"I": of_16_bits(70000, np.int32), "F": of_16_bits(0.5, "f4")}.items():
        depths(tmp_path / name, {"a/1.tif": values})
        with one_line(f"{tmp_path / name}/a/1.tif: ", f"mode {name})", "must have 8 or 16 bits"):
            ImageFolderDataModule(tmp_path / name, num_clients=1).setup()
    depths(tmp_path / "both", {"a/1.png": of_16_bits(3, np.uint8), "a/2.png": of_16_bits(3)})
    with one_line("a/1.png and ", "a/2.png are read as uint8 and float32; all must have one type"):
        ImageFolderDataModule(tmp_path / "both", num_clients=1).setup()


def test_images_with_a_point_before_their_name_are_left_out(tmp_path):
    """Jupyter keeps copies in .ipynb_checkpoints, and macOS writes files such as ._a.png."""
    write(tmp_path / ".set", {"cat/a.png": 1, "dog/b.png": 2, ".ipynb_checkpoints/a.png": 1})
    write(tmp_path / ".set", {"dog/.copies/b.png": 2})
    (tmp_path / ".set" / "dog" / "._b.png").write_bytes(b"no image")
    (tmp_path / ".set" / ".DS_Store").write_bytes(b"no image")
    data = ImageFolderDataModule(tmp_path / ".set", num_clients=1)
    assert data.class_names == ["cat", "dog"]
    assert data.samples.inputs[:, 0, 0, 0].tolist() == [1, 2]
    said = "images left out, as the name of a folder or file begins with a point: 3, first "
    assert data.conversions[-1] == f"{said}'.ipynb_checkpoints/a.png'"


def test_links_to_folders_are_followed(tmp_path, one_line):
    """A data set may be put together from links; no client is lost, and a circle has an end."""
    write(tmp_path / "disk", {"photo/cat/a.png": 1, "photo/dog/b.png": 2})
    write(tmp_path / "set", {"sketch/cat/c.png": 3})
    (tmp_path / "set" / "photo").symlink_to(tmp_path / "disk" / "photo")
    (tmp_path / "set" / "sketch" / "back").symlink_to(tmp_path / "set")
    data = ImageFolderDataModule(tmp_path / "set", "client/class")
    loaded = data.load()
    assert loaded.client_ids.tolist() == ["photo", "photo", "sketch"]
    assert loaded.train.inputs[:, 0, 0, 0].tolist() == [1, 2, 3]
    (tmp_path / "set" / "sketch" / "cat" / "d.png").symlink_to(tmp_path / "gone.png")
    with one_line("sketch/cat/d.png' is a link to a file that does not exist"):
        data.load()
