"""Numbers that describe a partition: how far each client's labels differ from all clients'."""

import numpy as np

from .index_arrays import IndexArrays
from .lazy import Drawn


def label_shares(counts: np.ndarray) -> np.ndarray:
    """Returns `counts` of each client and class as shares, float64 [M, K]; NaN without samples."""
    with np.errstate(invalid="ignore"):
        return counts / counts.sum(1, keepdims=True)


def total_variation(shares: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the total variation distances Σ_k |p_k - q_k| / 2 of distributions [..., K]."""
    return np.abs(shares - others).sum(-1) / 2


def wasserstein(shares: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the Wasserstein-1 distances Σ_k |P_k - Q_k| of distributions [..., K], 0 to K - 1.

    P and Q are the cumulative sums. Labels are points on a line at distance 1 from one another, so
    that the distance depends on the order of the classes, which total variation does not.
    """
    return np.abs(np.cumsum(shares - others, axis=-1)).sum(-1)


def effective_classes(shares: np.ndarray) -> np.ndarray:
    """Returns exp(-Σ_k p_k log p_k), from 1 (one class) to K (equal shares); p is [..., K]."""
    logarithms = np.log(np.where(shares > 0, shares, 1.0))
    return np.exp(-(shares * logarithms).sum(-1))


def label_overlap(shares: np.ndarray) -> float:
    """Returns Σ_k min(p_k, q_k), averaged over all pairs of clients: 1 for equal distributions.

    Shares are [M, K]; rows of NaN are left out. The result is NaN if fewer than two are left.
    """
    known = np.sort(shares[~np.isnan(shares).any(1)], axis=0)
    clients = len(known)
    if clients < 2:
        return float("nan")
    # In ascending order, the r-th share of a class is the smaller one of its pairs with all later
    # clients.
    later = np.arange(clients - 1, -1, -1)
    return float((known * later[:, None]).sum() / (clients * (clients - 1) / 2))


def shared_samples(arrays: IndexArrays, num_samples: int) -> int:
    """Returns how many of a data set's `num_samples` samples belong to more than one client."""
    if arrays.is_shared:
        return len(arrays[0]) if len(arrays) > 1 else 0
    holders = np.zeros(num_samples, np.int64)
    for clients in arrays.blocks():
        # A client may hold a sample several times.
        owner = np.repeat(np.arange(clients.start, clients.stop), arrays.sizes[clients])
        pairs = np.unique(np.stack([owner, arrays.of(clients)]), axis=1)
        holders += np.bincount(pairs[1], minlength=num_samples)
    return int((holders > 1).sum())


def trained_on(train: IndexArrays, test: IndexArrays, num_samples: int) -> int:
    """Returns how many samples some client is tested on and some client trains on."""
    return int((is_owned(train, num_samples) & is_owned(test, num_samples)).sum())


def is_owned(arrays: IndexArrays, num_samples: int) -> np.ndarray:
    """Returns which samples some client has, bool [N]."""
    some = np.zeros(num_samples, bool)
    if arrays.is_shared:
        some[arrays[0]] = True
        return some
    for clients in arrays.blocks():
        some[arrays.of(clients)] = True
        # Of a million clients, the first few thousand have every sample that is drawn from.
        if isinstance(arrays, Drawn) and some[: arrays.total].all():
            break
    return some
