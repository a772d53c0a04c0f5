"""Image data sets that are downloaded on first use.

torchvision downloads and reads most data sets. It is imported only when data are loaded.
"""

import gzip
import os
import shutil
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ..base import FederatedDataModule
from ..errors import ConfigError, require_value
from ..files import new_content
from ..protocols.protocol import Protocol
from ..randomness import generator
from ..ranges import Count, as_int
from ..rules.partitioner import Partitioner
from ..samples.images import decode
from ..samples.loaded import Loaded
from ..samples.samples import TensorSamples

Pairs = tuple[Tensor, Tensor]
"""Images uint8 [N, C, H, W] and labels int64 [N]."""
EMNISTSplit = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]


def _idx_files(folder: str, *parts: str) -> tuple[str, ...]:
    """Returns the paths of the files with the images and the labels of each part."""
    kinds = ("images-idx3", "labels-idx1")
    return tuple(f"{folder}/raw/{part}-{kind}-ubyte" for part in parts for kind in kinds)


class ImageDataModule(FederatedDataModule):
    """The base class of image data sets with a download and an official test set.

    Images are stored as uint8, and every batch is scaled to float32 in [0, 1]. Nothing is
    downloaded if the files exist. Archives that a user has put into the folder are unpacked instead
    of downloaded. All data sets have these arguments.

    Args:
        root: The folder of all data sets, with a subfolder for each of them.
        train_samples: The number of samples to use of the official training set, drawn at random by
            `seed`; None uses all.
    """

    title: ClassVar[str]  # the name of the data set, and of torchvision's class
    source: ClassVar[str]  # the address of the folder with the archives
    archives: Sequence[str]  # paths below `root`, where a user can put them instead of a download
    files: Sequence[str]  # paths below `root` of the files that `read` requires

    def __init__(
        self,
        num_clients: int | None = 100,
        partition: Partitioner | None = None,
        protocol: Protocol | None = None,
        root: str | os.PathLike = "data",
        train_samples: Count | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_clients, partition, protocol, **kwargs)
        self.root = Path(root).expanduser()
        self.train_samples = as_int(train_samples)

    def download(self) -> None:
        """Downloads and unpacks the files that are missing."""
        for train in (True, False):
            self.open_split(train, download=True)

    def read(self, train: bool) -> Pairs:
        """Reads the images and labels of the official training or test set."""
        stored = self.open_split(train)
        labels = stored.labels if hasattr(stored, "labels") else stored.targets
        images = torch.as_tensor(stored.data)
        if images.ndim == 3:
            images = images.unsqueeze(1)
        elif images.shape[1] != 3:  # the channels are last
            images = images.permute(0, 3, 1, 2).contiguous()
        return images, torch.as_tensor(labels, dtype=torch.int64)

    def open_split(self, train: bool, **arguments: Any) -> Any:
        """Opens a data set of torchvision, which verifies the checksums of its files."""
        from torchvision import datasets

        return getattr(datasets, self.title)(self.root, train=train, **arguments)

    def prepare_data(self) -> None:
        if not self._missing_files():
            return
        try:
            self.download()
        except Exception as error:  # urllib, zipfile, tarfile and torchvision raise many types
            archives = [self.root / archive for archive in self.archives]
            names = ", ".join(archive.name for archive in archives)
            raise ConfigError(
                f"{self._key} does not hold {self.title}, which cannot be downloaded "
                f"({_shorten(error)}); put {names} from {self.source} into {archives[0].parent}"
            ) from error

    def load(self) -> Loaded:
        if missing := self._missing_files():
            raise ConfigError(
                f"{self._key} does not hold {self.title} ({missing[0]} is missing); "
                "call prepare_data() first, which downloads the data"
            )
        try:
            inputs, targets = self.read(train=True)
            test = self.read(train=False)
        except Exception as error:  # damaged files raise many types
            raise ConfigError(
                f"{self._key} holds {self.title}, which cannot be read "
                f"({_shorten(error)}); remove the files, so that they are downloaded anew"
            ) from error
        if self.train_samples is not None:
            number = self.train_samples
            most = len(targets)
            expected = f"at most {most}, the training samples of {self.title}"
            require_value(f"{type(self).__name__}.train_samples", number, number <= most, expected)
            rng = generator(self.seed, "train_samples")
            chosen = torch.from_numpy(np.sort(rng.choice(most, number, replace=False)))
            inputs = inputs[chosen]
            targets = targets[chosen]
        return Loaded(TensorSamples(inputs, targets), TensorSamples(*test))

    def describe(self) -> str:
        some = ""
        if self.train_samples:
            some = f"{self.train_samples} training samples only, "
        return some + super().describe()

    @property
    def _key(self) -> str:
        return f"{type(self).__name__}.root: {str(self.root)!r}"

    def _missing_files(self) -> list[str]:
        return [file for file in self.files if not (self.root / file).is_file()]


class MNISTDataModule(ImageDataModule):
    """MNIST: 60,000 training and 10,000 test images [1, 28, 28] of the ten digits.

    LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document Recognition",
    Proc. IEEE 1998.

    Example:
        >>> data = MNISTDataModule(num_clients=10, root="~/data")  # downloads on first use
        >>> data.partitioner, data.protocol
        (IID(), SplitOwn(test=0.2, validation=0.1))
    """

    title = "MNIST"
    source = "https://ossci-datasets.s3.amazonaws.com/mnist"
    files = _idx_files("MNIST", "train", "t10k")
    archives = tuple(f"{file}.gz" for file in files)


class FashionMNISTDataModule(ImageDataModule):
    """FashionMNIST: 60,000 training and 10,000 test images [1, 28, 28] of ten kinds of clothing.

    Xiao, Rasul, Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
    Algorithms", 2017. Files of Debian's package `dataset-fashion-mnist` are used where it is
    installed.

    Example:
        >>> FashionMNISTDataModule(num_clients=10).archives[0]
        'FashionMNIST/raw/train-images-idx3-ubyte.gz'
    """

    title = "FashionMNIST"
    source = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
    files = _idx_files("FashionMNIST", "train", "t10k")
    archives = tuple(f"{file}.gz" for file in files)
    installed: ClassVar[Path] = Path("/usr/share/datasets/fashion-mnist")

    def download(self) -> None:
        for path in map(self.root.joinpath, self._missing_files()):
            packed = self.installed / f"{path.name}.gz"
            if packed.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                with new_content(path) as opened:
                    opened.write(gzip.decompress(packed.read_bytes()))
        if self._missing_files():
            super().download()


class EMNISTDataModule(ImageDataModule):
    """EMNIST: handwritten letters and digits [1, 28, 28], in one of six selections.

    Cohen, Afshar, Tapson, van Schaik, "EMNIST: Extending MNIST to Handwritten Letters", IJCNN 2017.
    The files contain mirrored images (rows and columns exchanged); this data module turns them
    upright. Classes are counted from 0, also for "letters", whose file counts from 1. One download
    contains all selections.

    Args:
        split: "byclass" (62 classes), "bymerge" and "balanced" (47), "letters" (26), "digits" and
            "mnist" (10).

    Example:
        >>> EMNISTDataModule("letters", num_clients=10).archives
        ('EMNIST/raw/gzip.zip',)
    """

    title = "EMNIST"
    source = "https://biometrics.nist.gov/cs_links/EMNIST"
    archives = ("EMNIST/raw/gzip.zip",)

    def __init__(self, split: EMNISTSplit = "balanced", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.split = split
        self.files = _idx_files("EMNIST", f"emnist-{split}-train", f"emnist-{split}-test")

    def open_split(self, train: bool, **arguments: Any) -> Any:
        return super().open_split(train, split=self.split, **arguments)

    def read(self, train: bool) -> Pairs:
        images, labels = super().read(train)
        return images.transpose(2, 3).contiguous(), labels - int(self.split == "letters")


class CIFAR10DataModule(ImageDataModule):
    """CIFAR-10: 50,000 training and 10,000 test images [3, 32, 32] of ten classes.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.

    Example:
        >>> CIFAR10DataModule(num_clients=10).archives
        ('cifar-10-python.tar.gz',)
    """

    title = "CIFAR10"
    source = "https://www.cs.toronto.edu/~kriz"
    archives = ("cifar-10-python.tar.gz",)
    files = (  # the last one has the names of the classes, which torchvision requires
        *(f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)),
        *(f"cifar-10-batches-py/{name}" for name in ("test_batch", "batches.meta")),
    )


class CIFAR100DataModule(CIFAR10DataModule):
    """CIFAR-100: as CIFAR-10, with a hundred (fine) classes.

    Example:
        >>> CIFAR100DataModule(num_clients=10).archives
        ('cifar-100-python.tar.gz',)
    """

    title = "CIFAR100"
    archives = ("cifar-100-python.tar.gz",)
    files = ("cifar-100-python/train", "cifar-100-python/test", "cifar-100-python/meta")


class SVHNDataModule(ImageDataModule):
    """SVHN: 73,257 training and 26,032 test images [3, 32, 32] of digits on house numbers.

    Netzer, Wang, Coates, Bissacco, Wu, Ng, "Reading Digits in Natural Images with Unsupervised
    Feature Learning", NIPS workshop 2011. The file gives the digit 0 the label 10, which becomes 0.
    The 531,131 easier "extra" images are not used.

    Example:
        >>> SVHNDataModule(num_clients=10).archives
        ('SVHN/train_32x32.mat', 'SVHN/test_32x32.mat')
    """

    title = "SVHN"
    source = "http://ufldl.stanford.edu/housenumbers"
    archives = files = ("SVHN/train_32x32.mat", "SVHN/test_32x32.mat")

    def open_split(self, train: bool, **arguments: Any) -> Any:
        from torchvision.datasets import SVHN

        return SVHN(self.root / self.title, split="train" if train else "test", **arguments)


class TinyImageNetDataModule(ImageDataModule):
    """Tiny ImageNet: 100,000 training and 10,000 test images [3, 64, 64] of 200 classes.

    Le, Yang, "Tiny ImageNet Visual Recognition Challenge", Stanford CS231N 2015. The labels of its
    test set were never published. As is usual, the validation set serves as the official test set.
    Classes are numbered in the order of their WordNet ids. The images are decoded once, which takes
    about a minute, and stored beside the originals as arrays (1.4 GB).

    Example:
        >>> TinyImageNetDataModule(num_clients=10).archives
        ('tiny-imagenet-200.zip',)
    """

    title = "TinyImageNet"
    source = "http://cs231n.stanford.edu"
    md5 = "90528d7ca1a48142e341f4ef8d21d0de"
    archives = ("tiny-imagenet-200.zip",)
    files = tuple(
        f"tiny-imagenet-200/{split}_{kind}.npy"
        for kind in ("images", "labels")
        for split in ("train", "val")
    )

    def download(self) -> None:
        folder = self.root / "tiny-imagenet-200"
        if not (folder / "wnids.txt").is_file():
            self._unpack(folder)
        wnids = sorted((folder / "wnids.txt").read_text().split())
        train = [
            (path, wnid)
            for wnid in wnids
            for path in sorted((folder / "train" / wnid / "images").iterdir())
        ]
        lines = (folder / "val" / "val_annotations.txt").read_text().splitlines()
        rows = [line.split("\t") for line in lines]
        val = [(folder / "val" / "images" / name, wnid) for name, wnid, *_box in rows]
        for split, pairs in (("train", train), ("val", val)):
            paths, names = zip(*pairs, strict=True)
            labels = np.array([wnids.index(wnid) for wnid in names], np.int64)
            for kind, array in (("images", decode(paths)), ("labels", labels)):
                with new_content(folder / f"{split}_{kind}.npy") as file:
                    np.save(file, array)

    def _unpack(self, folder: Path) -> None:
        from torchvision.datasets.utils import download_and_extract_archive

        self.root.mkdir(parents=True, exist_ok=True)
        # The archive is unpacked into a temporary folder first, so that a folder of the final name
        # is always complete.
        partial = tempfile.mkdtemp(prefix=f"{folder.name}-", dir=self.root)
        address = f"{self.source}/{self.archives[0]}"
        archive = self.archives[0]
        try:
            download_and_extract_archive(address, str(self.root), partial, archive, self.md5)
            os.replace(Path(partial) / folder.name, folder)
        finally:
            shutil.rmtree(partial)

    def read(self, train: bool) -> Pairs:
        split = self.root / "tiny-imagenet-200" / ("train" if train else "val")
        # A memory map reads the images only when they are copied. It is in mode "c", as PyTorch
        # warns about read-only arrays.
        images = np.load(f"{split}_images.npy", mmap_mode="c")
        return torch.from_numpy(images), torch.from_numpy(np.load(f"{split}_labels.npy"))


def _shorten(error: Exception) -> str:
    """Shortens the message of an error to the last line, which names the innermost cause."""
    lines = str(error).split("\n") if str(error).strip() else [type(error).__name__]
    return textwrap.shorten([line for line in lines if line.strip()][-1], 120, placeholder=" ...")
