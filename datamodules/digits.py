"""The handwritten digits of scikit-learn, a real data set without a download."""

import numpy as np
import torch

from datamodules.base import FederatedDataModule, Loaded
from datamodules.label_skew import Dirichlet
from datamodules.partitioners import Partitioner
from datamodules.protocols import Protocol
from datamodules.samples import TensorSamples


class DigitsDataModule(FederatedDataModule):
    """The 1,797 handwritten digits of scikit-learn: inputs [N, 1, 8, 8], ten classes.

    Inputs are float32 in [0, 1]. scikit-learn has no test set for the digits. This data module
    defines one: every fifth sample of each class, in the order of the file.

    Args:
        num_clients: The number of clients M.
        partition: The rule that assigns samples to clients; None is `Dirichlet(0.1)`.
        protocol: The test protocol; None is `SplitOwn()`.
        batch_size: Samples per batch of the loaders; None loads all samples as one batch.
        seed: Seed of the partition and of the order of training samples; None is 0.
        num_workers: Worker processes of the loaders.

    Example:
        >>> from datamodules import Dirichlet
        >>> data = DigitsDataModule(num_clients=10, partition=Dirichlet(0.3), seed=1)
        >>> data.num_clients, data.num_classes, len(data.samples)
        (10, 10, 1797)
    """

    def __init__(
        self,
        num_clients: int = 20,
        partition: Partitioner | None = None,
        protocol: Protocol | None = None,
        batch_size: int | None = 32,
        seed: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            num_clients,
            Dirichlet(0.1) if partition is None else partition,
            protocol,
            batch_size,
            seed,
            num_workers,
        )

    def load(self) -> Loaded:
        """Loads the training and the test samples."""
        # An optional dependency that only this data set needs.
        from sklearn.datasets import load_digits

        digits = load_digits()
        inputs = torch.from_numpy(digits.images.astype(np.float32) / 16).unsqueeze(1)
        targets = torch.from_numpy(digits.target.astype(np.int64))
        is_test = torch.zeros(len(targets), dtype=torch.bool)
        for label in range(10):
            is_test[(targets == label).nonzero().squeeze(1)[4::5]] = True
        return Loaded(
            TensorSamples(inputs[~is_test], targets[~is_test]),
            TensorSamples(inputs[is_test], targets[is_test]),
        )
