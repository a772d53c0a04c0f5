"""Tiny ImageNet, whose images are decoded once and then stored as arrays."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from ..samples.images import decode
from .vision import ImageDataModule, Pairs


class TinyImageNetDataModule(ImageDataModule):
    """Tiny ImageNet: 100,000 training and 10,000 test images [3, 64, 64] of 200 classes.

    Le, Yang, "Tiny ImageNet Visual Recognition Challenge", Stanford CS231N 2015. The labels of its
    test set were never published. As is usual, the validation set serves as the official test set.
    Classes are numbered in the order of their WordNet ids. The images are decoded once, which takes
    about a minute, and stored beside the originals as arrays (1.4 GB). The arguments are those of
    `ImageDataModule`.

    Example:
        >>> data = TinyImageNetDataModule(num_clients=10)  # downloads on first use
        >>> data.archives
        ('tiny-imagenet-200.zip',)
    """

    title = "TinyImageNet"
    source = "http://cs231n.stanford.edu"
    md5 = "90528d7ca1a48142e341f4ef8d21d0de"
    folder = "tiny-imagenet-200"
    archives = (f"{folder}.zip",)
    files = (
        *(f"tiny-imagenet-200/{split}_images.npy" for split in ("train", "val")),
        *(f"tiny-imagenet-200/{split}_labels.npy" for split in ("train", "val")),
    )

    def download(self) -> None:
        """Downloads and unpacks the archive if its files are missing, and decodes the images."""
        folder = self.root / self.folder
        if not (folder / "wnids.txt").is_file():
            self._unpack()
        classes = sorted((folder / "wnids.txt").read_text().split())
        numbers = {wnid: number for number, wnid in enumerate(classes)}
        train = [
            (path, numbers[wnid])
            for wnid in classes
            for path in sorted((folder / "train" / wnid / "images").iterdir())
        ]
        lines = (folder / "val" / "val_annotations.txt").read_text().splitlines()
        val = [
            (folder / "val" / "images" / name, numbers[wnid])
            for name, wnid, *_box in (line.split("\t") for line in lines)
        ]
        for split, pairs in (("train", train), ("val", val)):
            paths, labels = zip(*pairs, strict=True)
            _save(folder / f"{split}_images.npy", decode(paths))
            _save(folder / f"{split}_labels.npy", np.array(labels, np.int64))

    def _unpack(self) -> None:
        """Downloads the archive, unless the file exists, and unpacks it."""
        from torchvision.datasets.utils import download_and_extract_archive

        self.root.mkdir(parents=True, exist_ok=True)
        (archive,) = self.archives
        # The archive is unpacked into a temporary folder first, so that a folder of the final name
        # is always complete.
        partial = tempfile.mkdtemp(prefix=f"{self.folder}-", dir=self.root)
        try:
            download_and_extract_archive(
                f"{self.source}/{archive}", str(self.root), partial, archive, self.md5
            )
            os.replace(Path(partial) / self.folder, self.root / self.folder)
        finally:
            shutil.rmtree(partial)

    def read(self, train: bool) -> Pairs:
        split = self.root / self.folder / ("train" if train else "val")
        # A memory map reads the images only when they are copied. It is in mode "c", as PyTorch
        # warns about read-only arrays.
        images = np.load(f"{split}_images.npy", mmap_mode="c")
        return torch.from_numpy(images), torch.from_numpy(np.load(f"{split}_labels.npy"))


def _save(path: Path, array: np.ndarray) -> None:
    """Writes an array such that a file of the name `path` is complete or does not exist."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.save(file, array)
    os.replace(partial, path)
