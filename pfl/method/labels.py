"""The numbers of samples of each class that clients have."""

from __future__ import annotations

from torch import Tensor, nn

from pfl.clients import Clients


def label_counts(clients: Clients, classes: int, like: Tensor) -> Tensor:
    """Returns how many training samples of each class the clients have, [C, classes].

    Args:
        clients: C clients, with one label per sample.
        classes: The number of classes.
        like: A tensor of the dtype and the device of the counts.
    """
    counts = like.new_zeros(len(clients), classes)
    for rows, batch in clients.training_samples():
        real = batch.sample_weights(counts.dtype) > 0  # no padding
        counts[rows] += (nn.functional.one_hot(batch.targets, classes) * real[..., None]).sum(1)
    return counts
