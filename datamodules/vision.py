"""Image data sets that are downloaded when they are first used.

torchvision, which downloads and reads most of them, is imported only when data are needed.
"""

import os
import shutil
import tempfile
import textwrap
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from datamodules.base import FederatedDataModule, Loaded
from datamodules.errors import ConfigError, check_whole
from datamodules.partitioners import Partitioner
from datamodules.protocols import Protocol
from datamodules.randomness import generator
from datamodules.samples import TensorSamples

Pairs = tuple[Tensor, Tensor]
"""Images uint8 [N, C, H, W] and labels int64 [N]."""


class ImageDataModule(FederatedDataModule):
    """What the image data sets share: a folder, a download, uint8 images, an official test set.

    Images stay uint8 in memory and become float32 in [0, 1] batch by batch. They are neither
    normalized nor augmented. Nothing is downloaded when the files are there; archives that were
    put into the folder by hand are unpacked.

    Args:
        num_clients: M; None takes one client per id with ``partition=Natural()``.
        partition: The rule that deals samples to clients; None is ``IID()``.
        protocol: What every client is tested on; None is ``SplitOwn()``.
        batch_size: Samples per batch of the loaders; None loads everything as one batch.
        seed: Seed of the partition and of the order of training samples; None is 0.
        num_workers: Worker processes of the loaders.
        root: The folder of all data sets; each has a folder of its own in it.
        train_samples: Use only this many samples of the official training set, drawn at random by
            ``seed``; None uses all.

    Raises:
        ConfigError: An argument is out of range, or (when the data are needed) the files are not
            there and cannot be downloaded, or cannot be read.
    """

    title: ClassVar[str]
    """The name of the data set."""
    source: ClassVar[str]
    """The address of the folder where the archives lie."""

    def __init__(
        self,
        num_clients: int | None = 100,
        partition: Partitioner | None = None,
        protocol: Protocol | None = None,
        batch_size: int | None = 32,
        seed: int | None = None,
        num_workers: int = 0,
        root: str | os.PathLike = "data",
        train_samples: int | None = None,
    ) -> None:
        super().__init__(num_clients, partition, protocol, batch_size, seed, num_workers)
        self.root = Path(root).expanduser()
        self.train_samples = train_samples
        if train_samples is not None:
            self.train_samples = check_whole("train_samples", train_samples)

    @property
    @abstractmethod
    def archives(self) -> Sequence[str]:
        """What can be put below ``root`` by hand instead of a download."""

    @property
    @abstractmethod
    def files(self) -> Sequence[str]:
        """The files below ``root`` that ``read`` needs."""

    @abstractmethod
    def download(self) -> None:
        """Make ``files``: download and unpack what is missing."""

    @abstractmethod
    def read(self, train: bool) -> Pairs:
        """Return the images and labels of the official training or test set."""

    def prepare_data(self) -> None:
        """Download the data; does nothing when they are there."""
        if not self._missing():
            return
        try:
            self.download()
        except Exception as error:  # urllib, zipfile, tarfile and torchvision have many kinds
            archives = [self.root / archive for archive in self.archives]
            names = ", ".join(archive.name for archive in archives)
            raise ConfigError(
                f"root={str(self.root)!r} does not hold {self.title} and it cannot be downloaded "
                f"({_in_short(error)}); put {names} from {self.source} into {archives[0].parent}"
            ) from error

    def load(self) -> Loaded:
        """Return the training and test samples."""
        if missing := self._missing():
            raise ConfigError(
                f"root={str(self.root)!r} does not hold {self.title} ({missing[0]} is missing); "
                "call prepare_data() first, which downloads it"
            )
        try:
            (inputs, targets), test = self.read(train=True), self.read(train=False)
        except Exception as error:  # whatever a damaged file leads to
            raise ConfigError(
                f"root={str(self.root)!r} holds {self.title}, but it cannot be read "
                f"({_in_short(error)}); remove it there, so that it is downloaded anew"
            ) from error
        if self.train_samples is not None:
            chosen = self._chosen(len(targets), self.train_samples)
            inputs, targets = inputs[chosen], targets[chosen]
        return Loaded(TensorSamples(inputs, targets), TensorSamples(*test))

    def describe(self) -> str:
        """Say in words how samples are dealt and what is evaluated, for the record of a run."""
        if self.train_samples is None:
            return super().describe()
        return f"{self.train_samples} training samples only, {super().describe()}"

    def _missing(self) -> list[str]:
        return [file for file in self.files if not (self.root / file).is_file()]

    def _chosen(self, available: int, wanted: int) -> Tensor:
        if wanted > available:
            raise ConfigError(
                f"train_samples={wanted} is more than the {available} training samples of "
                f"{self.title}"
            )
        rng = generator(self.seed, "train_samples")
        return torch.from_numpy(np.sort(rng.choice(available, wanted, replace=False)))


class MNISTDataModule(ImageDataModule):
    """MNIST: 60,000 training and 10,000 test images [1, 28, 28] of the ten digits.

    LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document Recognition",
    Proc. IEEE 1998. The arguments are those of ``ImageDataModule``.
    """

    title = "MNIST"
    source = "https://ossci-datasets.s3.amazonaws.com/mnist"

    @property
    def archives(self) -> Sequence[str]:
        """The four compressed files."""
        return [f"{file}.gz" for file in self.files]

    @property
    def files(self) -> Sequence[str]:
        """The four files."""
        kinds = ("images-idx3", "labels-idx1")
        return [f"{self.title}/raw/{s}-{k}-ubyte" for s in ("train", "t10k") for k in kinds]

    def download(self) -> None:
        """Download and unpack, which torchvision does."""
        _torchvision(self.title, self.root, train=False, download=True)

    def read(self, train: bool) -> Pairs:
        """Return the images and labels."""
        stored = _torchvision(self.title, self.root, train=train)
        return stored.data.unsqueeze(1), stored.targets


class FashionMNISTDataModule(MNISTDataModule):
    """FashionMNIST: 60,000 training and 10,000 test images [1, 28, 28] of ten kinds of clothing.

    Xiao, Rasul, Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
    Algorithms", 2017. The arguments are those of ``ImageDataModule``.
    """

    title = "FashionMNIST"
    source = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"


EMNISTSplit = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]


class EMNISTDataModule(ImageDataModule):
    """EMNIST: handwritten letters and digits [1, 28, 28], in one of six selections.

    Cohen, Afshar, Tapson, van Schaik, "EMNIST: Extending MNIST to Handwritten Letters", IJCNN 2017.
    The files hold the images mirrored at their diagonal; here they stand upright. Classes are
    counted from 0, also for "letters", whose file begins with 1. All selections are one download.

    Args:
        split: "byclass" (62 classes), "bymerge" and "balanced" (47), "letters" (26), "digits" and
            "mnist" (10).
        kwargs: Those of ``ImageDataModule``.
    """

    title = "EMNIST"
    source = "https://biometrics.nist.gov/cs_links/EMNIST"

    def __init__(self, split: EMNISTSplit = "balanced", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        known = EMNISTSplit.__args__  # type: ignore[attr-defined]
        if split not in known:
            raise ConfigError(f"split={split!r} of EMNIST must be one of {', '.join(known)}")
        self.split = split

    @property
    def archives(self) -> Sequence[str]:
        """The one archive."""
        return ["EMNIST/raw/gzip.zip"]

    @property
    def files(self) -> Sequence[str]:
        """The four files of the split."""
        kinds = ("images-idx3", "labels-idx1")
        splits = [f"EMNIST/raw/emnist-{self.split}-{part}" for part in ("train", "test")]
        return [f"{split}-{kind}-ubyte" for split in splits for kind in kinds]

    def download(self) -> None:
        """Download and unpack, which torchvision does unless the files it asks for are there."""
        for train in (True, False):
            _torchvision(self.title, self.root, split=self.split, train=train, download=True)

    def read(self, train: bool) -> Pairs:
        """Return the images and labels."""
        stored = _torchvision(self.title, self.root, split=self.split, train=train)
        images = stored.data.transpose(1, 2).unsqueeze(1).contiguous()
        return images, stored.targets - int(self.split == "letters")


class CIFAR10DataModule(ImageDataModule):
    """CIFAR-10: 50,000 training and 10,000 test images [3, 32, 32] of ten classes.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. The arguments are
    those of ``ImageDataModule``.
    """

    title = "CIFAR10"
    source = "https://www.cs.toronto.edu/~kriz"

    @property
    def archives(self) -> Sequence[str]:
        """The one archive."""
        return ["cifar-10-python.tar.gz"]

    @property
    def files(self) -> Sequence[str]:
        """The batches, and the names of the classes, which torchvision asks for."""
        batches = [f"data_batch_{i}" for i in range(1, 6)]
        return [f"cifar-10-batches-py/{n}" for n in (*batches, "test_batch", "batches.meta")]

    def download(self) -> None:
        """Download and unpack, which torchvision does."""
        _torchvision(self.title, self.root, train=False, download=True)

    def read(self, train: bool) -> Pairs:
        """Return the images and labels."""
        stored = _torchvision(self.title, self.root, train=train)
        images = torch.from_numpy(stored.data).permute(0, 3, 1, 2).contiguous()
        return images, torch.tensor(stored.targets, dtype=torch.int64)


class CIFAR100DataModule(CIFAR10DataModule):
    """CIFAR-100: 50,000 training and 10,000 test images [3, 32, 32] of a hundred (fine) classes.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. The arguments are
    those of ``ImageDataModule``.
    """

    title = "CIFAR100"

    @property
    def archives(self) -> Sequence[str]:
        """The one archive."""
        return ["cifar-100-python.tar.gz"]

    @property
    def files(self) -> Sequence[str]:
        """Training and test set, and the names of the classes, which torchvision asks for."""
        return [f"cifar-100-python/{name}" for name in ("train", "test", "meta")]


class TinyImageNetDataModule(ImageDataModule):
    """Tiny ImageNet: 100,000 training and 10,000 test images [3, 64, 64] of 200 classes.

    Le, Yang, "Tiny ImageNet Visual Recognition Challenge", Stanford CS231N 2015. The labels of its
    test set were never published: as everywhere, its validation set is the official test set here.
    Classes are numbered in the order of their WordNet ids. The images are decoded once, which takes
    about a minute, and kept beside the originals as arrays (1.4 GB). The arguments are those of
    ``ImageDataModule``.
    """

    title = "TinyImageNet"
    source = "http://cs231n.stanford.edu"
    md5 = "90528d7ca1a48142e341f4ef8d21d0de"
    folder = "tiny-imagenet-200"

    @property
    def archives(self) -> Sequence[str]:
        """The one archive."""
        return [f"{self.folder}.zip"]

    @property
    def files(self) -> Sequence[str]:
        """The arrays of decoded images, and their labels."""
        kinds = ("images", "labels")
        return [f"{self.folder}/{split}_{k}.npy" for split in ("train", "val") for k in kinds]

    def download(self) -> None:
        """Download and unpack what is not there, and decode the images."""
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
            _save(folder / f"{split}_images.npy", _decode(paths, (3, 64, 64)))
            _save(folder / f"{split}_labels.npy", np.array(labels, np.int64))

    def _unpack(self) -> None:
        from torchvision.datasets.utils import download_and_extract_archive

        self.root.mkdir(parents=True, exist_ok=True)
        (archive,) = self.archives
        # Unpacked elsewhere first: a folder that is there is whole.
        partial = tempfile.mkdtemp(prefix=f"{self.folder}-", dir=self.root)
        try:
            download_and_extract_archive(
                f"{self.source}/{archive}", str(self.root), partial, archive, self.md5
            )
            os.replace(Path(partial) / self.folder, self.root / self.folder)
        finally:
            shutil.rmtree(partial)

    def read(self, train: bool) -> Pairs:
        """Return the images and labels."""
        split = self.root / self.folder / ("train" if train else "val")
        # Read when they are copied, not twice; "c" as torch warns of arrays it must not write to.
        images = np.load(f"{split}_images.npy", mmap_mode="c")
        return torch.from_numpy(images), torch.from_numpy(np.load(f"{split}_labels.npy"))


def _torchvision(name: str, root: Path, **arguments: Any) -> Any:
    """Open a data set of torchvision, which checks what it reads."""
    from torchvision import datasets

    return getattr(datasets, name)(root, **arguments)


def _decode(paths: Iterable[Path], shape: tuple[int, int, int]) -> np.ndarray:
    """Read images as uint8 [N, 3, H, W]; gray ones get three equal channels."""
    from torchvision.datasets.folder import default_loader

    paths = list(paths)
    images = np.empty((len(paths), *shape), np.uint8)
    for image, path in zip(images, paths, strict=True):
        image[:] = np.asarray(default_loader(path)).transpose(2, 0, 1)
    return images


def _save(path: Path, array: np.ndarray) -> None:
    """Write an array so that the file is there whole or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.save(file, array)
    os.replace(partial, path)


def _in_short(error: Exception) -> str:
    """Say in part of a line what went wrong; the innermost reason is in the last line."""
    lines = str(error).split("\n") if str(error).strip() else [type(error).__name__]
    return textwrap.shorten([line for line in lines if line.strip()][-1], 120, placeholder=" ...")
