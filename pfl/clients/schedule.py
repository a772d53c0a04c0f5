"""How many local steps clients take in a round, and on how many samples each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LocalSchedule:
    """The local steps that a client takes in a round.

    Every epoch is a fresh shuffle of the client's samples, cut into mini-batches; the last
    mini-batch of an epoch has the samples that are left.

    Attributes:
        batch_size: Samples in a mini-batch; None: all samples of the client in every step.
        epochs: Passes over the client's own samples.
        steps: A number of steps that replaces `epochs`, over as many epochs as the steps take.
        purpose: A key of the shuffles: two loops of one round with different purposes see their
            samples in different orders.
        complete: True: stragglers take all of these steps, too. It is meant for a pass that
            measures something over all samples, such as a full gradient, and trains nothing.

    Example:
        A client with 10 samples has batches of 4, 4 and 2 samples in each epoch:

        >>> import numpy as np
        >>> LocalSchedule(batch_size=4, epochs=2).steps_of(np.array([10, 4, 0]))
        array([6, 2, 0])
        >>> LocalSchedule(batch_size=4, steps=5).steps_of(np.array([10, 4, 0]))
        array([5, 5, 0])
    """

    batch_size: int | None
    epochs: int = 1
    steps: int | None = None
    purpose: str = "train"
    complete: bool = False

    def steps_of(self, sizes: np.ndarray, work: np.ndarray | float = 1.0) -> np.ndarray:
        """Returns the local steps of clients with `sizes` samples, int64 [C]; 0 for size 0.

        Clients take the share `work` of them, rounded up, unless the pass is `complete`.
        """
        per_epoch = self.steps_per_epoch(sizes)
        steps = per_epoch * self.epochs
        if self.steps is not None:
            steps = np.where(per_epoch > 0, self.steps, 0)
        if self.complete:
            return steps
        # Rounded first: 0.07 * 100 is a little more than 7, and must not become 8.
        return np.ceil(np.round(work * steps, 9)).astype(np.int64)

    def samples_of(self, sizes: np.ndarray, work: np.ndarray | float = 1.0) -> np.ndarray:
        """Returns how many samples these steps have together, int64 [C]."""
        per_epoch = self.steps_per_epoch(sizes)
        epochs, left = np.divmod(self.steps_of(sizes, work), np.maximum(per_epoch, 1))
        size = self.batch_size or 0  # without one, no step is left beside whole epochs
        return epochs * sizes + left * size

    def steps_per_epoch(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the steps of one epoch of clients with `sizes` samples, int64 [C]."""
        if self.batch_size is None:
            return np.minimum(sizes, 1)
        return -(-sizes // self.batch_size)
