"""Images with the channels and the numbers of their files, and what is told of the others."""

import numpy as np
import pytest
from PIL import Image

from datamodules import ConfigError, ImageFolderDataModule


def of(folder, images, **options):
    """The data of images by name, all of class a."""
    (folder / "a").mkdir()
    for name, image in images.items():
        if not isinstance(image, Image.Image):
            image = Image.fromarray(image)
        image.save(folder / "a" / name)
    return ImageFolderDataModule(folder, num_clients=1, **options)


def values(data):
    """The values of each image as a batch has them, [N, C, pixels]."""
    import torch

    return data.samples.gather(torch.arange(len(data.samples)))[0].flatten(2).tolist()


SIZE = (2, 1)


@pytest.mark.parametrize(
    ("image", "name", "expected"),
    [
        (Image.new("L", SIZE, 51), "x.png", [[0.2, 0.2]]),
        (Image.new("RGBA", (1, 1), (0, 51, 102, 255)), "x.png", [[0], [0.2], [0.4], [1]]),
        (Image.new("LA", SIZE, (51, 0)), "x.png", [[0.2, 0.2], [0, 0]]),
        (Image.new("1", SIZE, 1), "x.png", [[1, 1]]),
        (np.array([[13107, 65535]], np.uint16), "x.png", [[0.2, 1]]),
        (np.array([[-1.5, 3000.25]], np.float32), "x.tif", [[-1.5, 3000.25]]),
        (np.array([[-7, 70000]], np.int32), "x.tif", [[-7, 70000]]),
    ],
)  # fmt: skip
def test_stored_channels(image, name, expected, tmp_path):
    (found,) = values(of(tmp_path, {name: image}, colour="stored"))
    assert found == [pytest.approx(row) for row in expected]


def test_pages_are_channels(tmp_path):
    (tmp_path / "a").mkdir()
    pages = [Image.new("L", SIZE, level) for level in (0, 51, 102, 153, 204)]
    pages[0].save(tmp_path / "a/x.tif", save_all=True, append_images=pages[1:])
    data = ImageFolderDataModule(tmp_path, num_clients=1, colour="stored")
    assert values(data) == [[pytest.approx([level] * 2) for level in (0, 0.2, 0.4, 0.6, 0.8)]]
    with pytest.raises(ConfigError, match=r"x.tif: 5 pages, of which one would be read"):
        ImageFolderDataModule(tmp_path, num_clients=1).setup()


def test_gray_on_request(tmp_path):
    images = {"x.png": Image.new("RGB", SIZE, (100, 200, 50)), "y.png": Image.new("L", SIZE, 51)}
    data = of(tmp_path, images, colour="gray")
    level = round(0.299 * 100 + 0.587 * 200 + 0.114 * 50)  # 153
    assert data.samples.inputs.flatten(1).tolist() == [[level, level], [51, 51]]
    assert data.conversions == [
        "2 of 2 images: values of 8 bits are divided by 255",
        "1 of 2 images: gray is 0.299 red + 0.587 green + 0.114 blue",
    ]


@pytest.mark.parametrize(
    ("image", "options", "said"),
    [
        (Image.new("RGB", SIZE), {}, []),
        (Image.new("L", SIZE), {}, ["gray is repeated in three channels"]),
        (Image.new("RGBA", SIZE), {}, ["transparency is left out"]),
        (Image.new("RGB", SIZE), {"image_size": 4}, ["resized to 4x4"]),
        (Image.new("RGB", (4, 4)), {"image_size": 4}, []),
    ],
)
def test_what_is_changed_is_told(image, options, said, tmp_path):
    data = of(tmp_path, {"x.png": image}, **options)
    data.setup()
    lines = ["values of 8 bits are divided by 255", *said]
    assert data.conversions == [f"1 of 1 images: {line}" for line in lines]


def test_an_image_of_48_bits_is_told(tmp_path):
    import struct
    import zlib

    def chunk(kind, content):
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    (tmp_path / "a").mkdir()
    head = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    row = zlib.compress(b"\0" + struct.pack(">HHH", 1000, 30000, 65535))
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", row) + chunk(b"IEND", b"")
    (tmp_path / "a/x.png").write_bytes(png)
    data = ImageFolderDataModule(tmp_path, num_clients=1)
    # 1000 // 256 is 3, 30000 // 256 is 117.
    assert data.samples.inputs.flatten().tolist() == [3, 117, 255]
    assert data.conversions[1] == "1 of 1 images: 16 bits a channel are cut to the upper 8"


def test_an_orientation_is_told(tmp_path):
    (tmp_path / "a").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", SIZE).save(tmp_path / "a/x.jpg", exif=exif)
    data = ImageFolderDataModule(tmp_path, num_clients=1)
    data.setup()
    assert data.conversions[1] == "1 of 1 images: the orientation of EXIF is not applied"


def test_lines_are_kept_with_the_cache(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    data = of(images, {"x.png": Image.new("L", SIZE, 51)}, cache=tmp_path / "cache")
    data.setup()
    again = ImageFolderDataModule(images, num_clients=1, cache=tmp_path / "cache")
    again.setup()
    assert again.conversions == data.conversions and len(again.conversions) == 2
    assert len([*(tmp_path / "cache").iterdir()]) == 2


def test_large_whole_numbers_are_refused(tmp_path):
    data = of(tmp_path, {"x.tif": np.array([[2**24 + 1, 0]], np.int32)}, colour="stored")
    with pytest.raises(ConfigError, match=r"x.tif: whole numbers above 2\*\*24"):
        data.setup()
