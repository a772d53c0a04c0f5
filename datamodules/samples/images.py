"""Reading of images in worker processes, and once, into a file that is mapped into memory."""

import functools
import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..errors import ConfigError
from ..files import new_content, new_file

Colour = Literal["rgb", "gray", "stored"]

_BLOCK = 64  # items that a worker process reads at a time
_ORIENTATION = 0x0112  # the tag of EXIF


def decode(
    paths: Sequence[Path],
    size: int | None = None,
    cache: Path | None = None,
    colour: Colour = "rgb",
) -> np.ndarray:
    """Reads images as uint8 [N, C, H, W], or with 16 bits as float32 in [0, 1]; see `pixels_of`.

    Where PyTorch has several threads, as many worker processes read the files. The result does not
    depend on their number.

    Args:
        paths: The files.
        size: Height and width to which the images are resized (bicubic); None keeps their size.
        cache: A folder for the decoded images, which are then mapped from a file into memory; what
            is written to the array does not reach the file. A second call with the same, unchanged
            files reads nothing else. None keeps the images in memory.
        colour: "rgb" for three channels, which are equal where an image is gray, "gray" for one,
            and "stored" for those of the file; see `stored_pixels`.
    """
    file = None
    if cache is not None:
        file = cache / f"{_fingerprint(paths, size, colour)}.npy"
    differ = "image_size: None, but {} and {} have the shapes {} and {}; it must be given"
    if colour == "stored":
        differ = "the images {} and {} have the shapes {} and {}; they must have one shape"
    return read_items(functools.partial(_image, paths, size, colour), paths, differ, file)


def changes_of(
    paths: Sequence[Path], size: int | None, cache: Path | None, colour: Colour
) -> list[str]:
    """Returns in what the samples of `decode` differ from the files, a line for each change.

    The heads of all files are read, or with a cache only once.
    """
    file = None
    if cache is not None:
        file = cache / f"{_fingerprint(paths, size, colour)}.json"
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
    counts: Counter[str] = Counter()
    for path in paths:
        counts.update(_changes_of_one(path, size, colour))
    lines = [f"{count:,} of {len(paths):,} images: {words}" for words, count in counts.items()]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with new_content(file) as content:
            content.write(json.dumps(lines).encode())
    return lines


def _changes_of_one(path: Path, size: int | None, colour: Colour) -> list[str]:
    """Returns in words what is changed when an image is read."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            mode = image.mode
            found = _changes_of_mode(image, colour)
            if (
                mode[:4] != "I;16"
                and not has_16_bits(image)
                and any(";16" in str(tile[3]) for tile in image.tile)
            ):
                found.append("16 bits a channel are cut to the upper 8")
            if size is not None and image.size != (size, size):
                found.append(f"resized to {size}x{size}")
            if image.format != "TIFF" and getattr(image, "n_frames", 1) > 1:
                found.append("the first of several pictures in the file is read")
            if image.getexif().get(_ORIENTATION, 1) != 1:
                found.append("the orientation of EXIF is not applied")
            return found
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as an image: {error}") from error


def _pages_of(image: Any) -> int:
    """Returns the number of pages of a TIFF file; of moving pictures the first is read."""
    if image.format == "TIFF":
        return image.n_frames
    return 1


def _changes_of_mode(image: Any, colour: Colour) -> list[str]:
    """Returns in words what becomes of the channels of an image."""
    mode = image.mode
    found = []
    if has_16_bits(image):
        found.append("gray values of 16 bits are divided by 65,535")
    elif mode[0] in "IF":
        return []  # numbers as they are, or refused
    else:
        found.append("values of 8 bits are divided by 255")
    if colour == "stored":
        if mode == "P":
            found.append("the colours of the palette stand for its numbers")
        return found
    if mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        found.append("transparency is left out")
    gray = mode[0] in "L1I"
    if colour == "rgb" and gray:
        found.append("gray is repeated in three channels")
    if colour == "gray" and not gray:
        found.append("gray is 0.299 red + 0.587 green + 0.114 blue")
    if mode in ("CMYK", "YCbCr", "LAB", "HSV"):
        found.append(f"{mode} is converted to RGB")
    return found


def read_items(
    read: Callable[[int], np.ndarray],
    names: Sequence[object],
    differ: str,
    file: Path | None = None,
) -> np.ndarray:
    """Reads N items of one shape and type in worker processes, as many as PyTorch has threads.

    Args:
        read: Reads an item, from 0 to N - 1; it may raise a ConfigError. Where processes are not
            forked it has to be picklable.
        names: The names of the items, at least one, for messages.
        differ: The message where two items differ in shape, with places for names and shapes.
        file: A file for the items, [N, ...], as in the cache of `decode`.
    """
    if file is None:
        return _stack(read, names, differ, None)
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        # A file of the final name is always complete, also where several processes write it.
        with new_file(file) as part:
            _stack(read, names, differ, part)
    return np.load(file, mmap_mode="c")  # PyTorch warns about read-only arrays


def _stack(
    read: Callable[[int], np.ndarray], names: Sequence[object], differ: str, file: Path | None
) -> np.ndarray:
    items: np.ndarray | None = None
    place = 0
    blocks = _Blocks(read, len(names))
    workers = min(torch.get_num_threads(), len(blocks))
    if workers == 1:
        workers = 0  # this process reads
    # With a generator of its own the loader does not draw from the global random state.
    loader = DataLoader(
        blocks,
        batch_size=None,
        num_workers=workers,
        collate_fn=unchanged,
        generator=torch.Generator(),
    )
    for block in loader:
        if isinstance(block, ConfigError):
            raise block
        for item in block:
            if items is None:
                items = _allocate((len(names), *item.shape), item.dtype, file)
            if items.shape[1:] != item.shape:
                shapes = ["x".join(map(str, shape)) for shape in (items.shape[1:], item.shape)]
                raise ConfigError(differ.format(names[0], names[place], *shapes))
            if items.dtype != item.dtype:
                raise ConfigError(
                    f"the items {names[0]} and {names[place]} are read as {items.dtype} and "
                    f"{item.dtype}; all must have one type (images of 8 bits a pixel become uint8, "
                    f"those of 16 bits float32)"
                )
            items[place] = item
            place += 1
    assert items is not None
    if isinstance(items, np.memmap):
        items.flush()
    return items


def _allocate(shape: tuple[int, ...], dtype: np.dtype, file: Path | None) -> np.ndarray:
    if file is None:
        return np.empty(shape, dtype)
    free = shutil.disk_usage(file.parent).free
    needed = math.prod(shape) * dtype.itemsize
    if free <= needed:  # a process that writes to a mapped file on a full disk is killed
        raise ConfigError(
            f"cache: {str(file.parent)!r} has {free / 2**20:.0f} MiB of free space; it must have "
            f"{needed / 2**20:.0f} MiB for {shape[0]} samples"
        )
    return np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)


class _Blocks(Dataset):
    """Blocks of items: each a list of arrays, or the error of one of them.

    An error is returned: PyTorch would add the worker's traceback to the message of a raised one.
    """

    def __init__(self, read: Callable[[int], np.ndarray], number: int) -> None:
        self.read = read
        self.number = number

    def __len__(self) -> int:
        return -(-self.number // _BLOCK)

    def __getitem__(self, block: int) -> list[np.ndarray] | ConfigError:
        first = block * _BLOCK
        try:
            return [self.read(i) for i in range(first, min(first + _BLOCK, self.number))]
        except ConfigError as error:
            return error


def _image(paths: Sequence[Path], size: int | None, colour: Colour, number: int) -> np.ndarray:
    """Reads an image of a list, [C, H, W]."""
    from PIL import Image

    name = str(paths[number])
    try:
        with Image.open(paths[number]) as image:
            if colour == "stored":
                return stored_pixels(image, size, name)
            pages = _pages_of(image)
            if pages > 1:
                raise ConfigError(
                    f"{name}: {pages} pages, of which one would be read; colour must be 'stored', "
                    "which makes channels of them, or the file must have one page"
                )
            mode = "RGB"
            if colour == "gray":
                mode = "L"
            return pixels_of(image, mode, size, name)
    except OSError as error:
        raise ConfigError(f"{paths[number]}: cannot be read as an image: {error}") from error


def pixels_of(image: Any, mode: str, size: int | None, name: str) -> np.ndarray:
    """Returns an image of Pillow as an array [C, H, W]: uint8, or float32 in [0, 1].

    Pixels of 8 bits or less become uint8, 0 to 255. Gray images with 16 bits become float32,
    v / 65535, which is v / 257 on the scale of 0 to 255, divided by 255.

    Args:
        image: The image.
        mode: "L" for one gray channel, "RGB" for three.
        size: Height and width to which the image is resized (bicubic); None keeps its size.
        name: The name of the image, for messages.
    """
    if has_16_bits(image):
        return _pixels_of_16_bits(image, len(mode), size)
    if image.mode[0] in "IF":
        raise ConfigError(
            f"{name}: an image of whole or floating numbers with 32 bits (Pillow's mode "
            f"{image.mode}), whose black and white are not known; it must have 8 or 16 bits a pixel"
        )
    image = image.convert(mode)
    if size is not None:
        image = image.resize((size, size))
    return np.asarray(image).reshape(image.height, image.width, -1).transpose(2, 0, 1)


def stored_pixels(image: Any, size: int | None, name: str) -> np.ndarray:
    """Returns an image of Pillow with the channels of its file, [C, H, W].

    Values of 8 bits become uint8, gray values of 16 bits float32, v / 65535. Whole and floating
    numbers of 32 bits become float32 as they are. The pages of a file follow one another as
    channels. Numbers of a palette become the colours that they stand for.

    Args:
        image: The image.
        size: Height and width to which the image is resized (bicubic); None keeps its size.
        name: The name of the image, for messages.
    """
    from PIL import Image

    pages = []
    for number in range(_pages_of(image)):
        if number:
            image.seek(number)
        page = image
        if has_16_bits(page):
            pages.append(_pixels_of_16_bits(page, 1, size))
            continue
        if page.mode in ("P", "1"):
            page = page.convert({"P": "RGB", "1": "L"}[page.mode])
        if page.mode[0] in "IF":
            whole = np.asarray(page)
            values = whole.astype(np.float32)
            if (values.astype(np.float64) != whole).any():
                raise ConfigError(
                    f"{name}: whole numbers above 2**24, which float32 does not hold; they must be "
                    "smaller"
                )
            page = Image.fromarray(values)
        if size is not None:
            page = page.resize((size, size))
        pixels = np.asarray(page)
        pages.append(pixels.reshape(page.height, page.width, -1).transpose(2, 0, 1))
    if len({(page.shape[1:], page.dtype) for page in pages}) > 1:
        raise ConfigError(f"{name}: its pages differ in size or in type; they must be alike")
    return np.concatenate(pages)


def has_16_bits(image: Any) -> bool:
    """Returns whether an image of Pillow is gray with 16 bits, which `convert` would cut at 255."""
    if image.mode == "I":  # Pillow reads these formats, which have at most 16 bits, as 32 bits
        return image.format in ("PNG", "PPM")
    return image.mode.startswith("I;16")


def _pixels_of_16_bits(image: Any, channels: int, size: int | None) -> np.ndarray:
    from PIL import Image

    values = np.asarray(image).astype(np.float32)
    if size is not None:
        resized = Image.fromarray(values).resize((size, size))
        values = np.asarray(resized).clip(0, 65535)  # as Pillow does with 8 bits
    return np.repeat(values[None] / np.float32(65535), channels, axis=0)


def _fingerprint(paths: Sequence[Path], size: int | None, colour: Colour) -> str:
    """Returns a name that differs where files, their order, their content or the form differ."""
    channels = {"rgb": "3", "gray": "1", "stored": "C"}[colour]
    digest = hashlib.sha256(f"uint8 or 16 bits [N, {channels}, H, W], size {size}\n".encode())
    for path in paths:
        status = path.stat()
        line = f"{os.path.abspath(path)}\0{status.st_size}\0{status.st_mtime_ns}\n"
        digest.update(os.fsencode(line))
    return digest.hexdigest()[:32]


def unchanged(batch: Any) -> Any:
    """Returns a batch as it is, where PyTorch's loader would put items together."""
    return batch
