"""Handwritten digits that come with scikit-learn: a real data set without a download."""

import numpy as np
import torch

from datamodules.base import FederatedDataModule, Loaded
from datamodules.label_skew import Dirichlet
from datamodules.partitioners import Partitioner
from datamodules.protocols import Protocol
from datamodules.samples import TensorSamples


class DigitsDataModule(FederatedDataModule):
    """scikit-learn's 1,797 handwritten digits: inputs float32 [N, 1, 8, 8] in [0, 1], 10 classes.

    scikit-learn gives no test set. The official test set here is this package's own choice: every
    fifth sample of each class, in the order of the file, which is a fifth of every class.

    Args:
        num_clients: M.
        partition: The rule that deals samples to clients; None is ``Dirichlet(0.1)``.
        protocol: What every client is tested on; None is ``SplitOwn()``.
        batch_size: Samples per batch of the loaders; None loads everything as one batch.
        seed: Seed of the partition and of the order of training samples; None is 0.
        num_workers: Worker processes of the loaders.
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
        """Return the training and test samples."""
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
