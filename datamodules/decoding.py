"""Reading of image files: in worker processes, and once, into a file that is mapped into memory."""

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from datamodules.errors import ConfigError

_BLOCK = 64  # images that a worker process reads at a time


def decode(paths: Sequence[Path], size: int | None = None, cache: Path | None = None) -> np.ndarray:
    """Reads images as uint8 [N, 3, H, W]; gray images get three equal channels.

    Where PyTorch has several threads, as many worker processes read the files. The result does not
    depend on their number.

    Args:
        paths: The files.
        size: Height and width to which the images are resized (bicubic); None keeps their size.
        cache: A folder for the decoded images. A second call with the same, unchanged files reads
            nothing else. None keeps the images in memory.

    Returns:
        An array in memory, or with `cache` one that is mapped from a file into memory; what is
        written to it does not reach the file.

    Raises:
        ConfigError: A file is no image, the images differ in size, or the cache's disk is full.
    """
    if cache is None:
        return _decoded(paths, size, None)
    file = cache / f"{_fingerprint(paths, size)}.npy"
    if not file.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        # A file of the final name is always complete, also where several processes write it.
        partial = file.with_suffix(f".{os.getpid()}.partial")
        try:
            _decoded(paths, size, partial)
            os.replace(partial, file)
        finally:
            partial.unlink(missing_ok=True)
    return np.load(file, mmap_mode="c")  # PyTorch warns about read-only arrays


def _decoded(paths: Sequence[Path], size: int | None, file: Path | None) -> np.ndarray:
    """Reads images into memory, or into a file that is mapped into memory."""
    images: np.ndarray | None = None
    number, blocks = 0, _Blocks(paths, size)
    workers = min(torch.get_num_threads(), len(blocks))
    # With a generator of its own the loader does not draw from the global random state.
    loader = DataLoader(
        blocks,
        batch_size=None,
        num_workers=workers if workers > 1 else 0,
        collate_fn=_unchanged,
        generator=torch.Generator(),
    )
    for block in loader:
        if isinstance(block, ConfigError):
            raise block
        for pixels in block:
            if images is None:
                images = _allocated((len(paths), 3, *pixels.shape[:2]), file)
            if images.shape[2:] != pixels.shape[:2]:
                sizes = ["x".join(map(str, s[:2])) for s in (images.shape[2:], pixels.shape)]
                raise ConfigError(
                    f"image_size: None, but {paths[0]} has {sizes[0]} pixels and {paths[number]} "
                    f"has {sizes[1]}; it must be given"
                )
            images[number] = pixels.transpose(2, 0, 1)
            number += 1
    assert images is not None
    if isinstance(images, np.memmap):
        images.flush()
    return images


def _allocated(shape: tuple[int, ...], file: Path | None) -> np.ndarray:
    """Returns an array uint8 in memory, or in a file."""
    if file is None:
        return np.empty(shape, np.uint8)
    free, needed = shutil.disk_usage(file.parent).free, int(np.prod(shape, dtype=np.int64))
    if free <= needed:  # a process that writes to a mapped file on a full disk is killed
        raise ConfigError(
            f"cache: {str(file.parent)!r} has {free / 2**20:.0f} MiB of free space; it must have "
            f"{needed / 2**20:.0f} MiB for {shape[0]} images"
        )
    return np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)


class _Blocks(Dataset):
    """Blocks of images: each a list of arrays uint8 [H, W, 3], or the error of one of them.

    An error is returned: PyTorch would add the worker's traceback to the message of a raised one.
    """

    def __init__(self, paths: Sequence[Path], size: int | None) -> None:
        self.paths, self.size = paths, size

    def __len__(self) -> int:
        """Returns the number of blocks."""
        return -(-len(self.paths) // _BLOCK)

    def __getitem__(self, number: int) -> list[np.ndarray] | ConfigError:
        """Reads the images of a block."""
        some = self.paths[number * _BLOCK : (number + 1) * _BLOCK]
        try:
            return [_pixels(path, self.size) for path in some]
        except ConfigError as error:
            return error


def _pixels(path: Path, size: int | None) -> np.ndarray:
    """Reads an image, uint8 [H, W, 3]."""
    from torchvision.datasets.folder import default_loader

    try:
        image = default_loader(str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as an image: {error}") from error
    return np.asarray(image if size is None else image.resize((size, size)))


def _fingerprint(paths: Sequence[Path], size: int | None) -> str:
    """Returns a name that differs where files, their order, their content or the size differ."""
    digest = hashlib.sha256(f"uint8 [N, 3, H, W], size {size}\n".encode())
    for path in paths:
        status = path.stat()
        line = f"{os.path.abspath(path)}\0{status.st_size}\0{status.st_mtime_ns}\n"
        digest.update(os.fsencode(line))
    return digest.hexdigest()[:32]


def _unchanged(block: object) -> object:
    """Returns a block as it is; by default PyTorch's loader makes tensors of arrays."""
    return block
