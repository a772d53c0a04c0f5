"""Reading of images in worker processes, and once, into a file that is mapped into memory."""

import functools
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..errors import ConfigError

_BLOCK = 64  # items that a worker process reads at a time


def decode(paths: Sequence[Path], size: int | None = None, cache: Path | None = None) -> np.ndarray:
    """Reads images as uint8 [N, 3, H, W], or with 16 bits as float32 in [0, 1]; see `pixels_of`.

    Gray images get three equal channels.

    Where PyTorch has several threads, as many worker processes read the files. The result does not
    depend on their number.

    Args:
        paths: The files.
        size: Height and width to which the images are resized (bicubic); None keeps their size.
        cache: A folder for the decoded images, which are then mapped from a file into memory; what
            is written to the array does not reach the file. A second call with the same, unchanged
            files reads nothing else. None keeps the images in memory.
    """
    file = None
    if cache is not None:
        file = cache / f"{_fingerprint(paths, size)}.npy"
    differ = "image_size: None, but {} and {} have the shapes {} and {}; it must be given"
    return read_items(functools.partial(_image, paths, size), paths, differ, file)


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
        partial = file.with_suffix(f".{os.getpid()}.partial")
        try:
            _stack(read, names, differ, partial)
            os.replace(partial, file)
        finally:
            partial.unlink(missing_ok=True)
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


def _image(paths: Sequence[Path], size: int | None, number: int) -> np.ndarray:
    """Reads an image of a list, [3, H, W]."""
    from PIL import Image

    try:
        with Image.open(paths[number]) as image:
            return pixels_of(image, "RGB", size, str(paths[number]))
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


def _fingerprint(paths: Sequence[Path], size: int | None) -> str:
    """Returns a name that differs where files, their order, their content or the size differ."""
    digest = hashlib.sha256(f"uint8 or 16 bits [N, 3, H, W], size {size}\n".encode())
    for path in paths:
        status = path.stat()
        line = f"{os.path.abspath(path)}\0{status.st_size}\0{status.st_mtime_ns}\n"
        digest.update(os.fsencode(line))
    return digest.hexdigest()[:32]


def unchanged(batch: Any) -> Any:
    """Returns a batch as it is, where PyTorch's loader would put items together."""
    return batch
