"""Missing values of inputs, which become means of each client's training samples."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from ..errors import ConfigError
from ..partitions.partition import Partition


def fill_with_means(
    inputs: Tensor,
    missing: np.ndarray,
    partition: Partition,
    columns: Sequence[str],
    clients: Sequence[str] | None,
    given: Callable[[int], Sequence[float]] | None = None,
) -> int:
    """Sets each missing value to the mean of its column over the owner's training samples.

    A client's validation and test samples get the mean of its training samples, too. Samples that
    no client has get the mean over all clients' training samples.

    Args:
        inputs: All samples, floating [N, F], changed in place.
        missing: Which values are missing, bool [N, F].
        partition: The samples of each client.
        columns: The names of the columns [F], for messages.
        clients: The names of the clients [M], likewise.
        given: Returns the means [F] of a client, or of all for -1, as of a finished run; NaN where
            there is none. None: those of these samples.

    Returns:
        The number of values that were set.

    Raises:
        ConfigError: A client has no value of a column to take a mean of, or a sample with a missing
            value has several owners.
    """
    rows = np.flatnonzero(missing.any(1))
    owner = np.full(len(missing), -1)
    for arrays in partition.splits.values():
        for client in range(len(arrays)):
            mine = arrays[client]
            mine = mine[missing[mine].any(1)]
            if ((owner[mine] >= 0) & (owner[mine] != client)).any():
                raise ConfigError(
                    "missing: 'mean', but clients share samples with missing values, so that each "
                    "of them would have another mean; it must be 'drop', or clients must not share"
                )
            owner[mine] = client
    everyone = np.unique(partition.train.flat)
    for client in np.unique(owner[rows]).tolist():
        train = everyone
        if client >= 0:
            train = partition.train[client]
        means = {}
        if given is not None:
            means = {k: mean for k, mean in enumerate(given(client)) if math.isfinite(mean)}
        mine = rows[owner[rows] == client]
        for column in np.flatnonzero(missing[mine].any(0)).tolist():
            mean = means.get(column)
            if mean is None:
                mean = mean_of_known(inputs, missing, train, column)
            if mean is None:
                name = str(client)
                if clients is not None:
                    name = clients[client]
                raise ConfigError(
                    f"missing: 'mean', but the client {name!r} has no value of the column "
                    f"{columns[column]!r} in its {len(train)} training samples; the column must be "
                    "left out, or missing must be 'drop'"
                )
            inputs[mine[missing[mine, column]], column] = mean
    return int(missing.sum())


def mean_of_known(
    inputs: Tensor, missing: np.ndarray, samples: np.ndarray, column: int
) -> float | None:
    """Returns the mean of a column over the samples that have a value; None if none has."""
    known = samples[~missing[samples, column]]
    if not len(known):
        return None
    return float(inputs[known, column].double().mean())
