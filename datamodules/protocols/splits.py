"""Splits of every client's own samples into parts, stratified by class."""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from ..partitions.index_arrays import IndexArrays, Ragged, stable_argsort
from ..partitions.lazy import Drawn, random_bits

# Row numbers in a block of clients are below 2^16: their sum with a draw of 36 bits is exact in
# float64, which has 53 bits.
_DRAW_BITS = 36


def split_off(
    owned: IndexArrays, labels: np.ndarray | None, shares: tuple[float, ...], rng: Generator
) -> list[IndexArrays]:
    """Splits every client's samples into parts of the given shares and a last part, the rest.

    The parts are ascending for every client. If `owned` is `Drawn`, the parts are `Drawn`, too.

    Args:
        owned: The samples of each client.
        labels: The class of every sample, int64 [N], for stratification; None splits at random.
        shares: The share of each part but the last, 0 to 1; see `Protocol` for the rounding.
        rng: The only source of randomness.
    """
    if isinstance(owned, Drawn):
        return _split_drawn(owned, labels, shares, rng)
    sizes = part_sizes(owned.sizes, shares)
    kind = owned[0].dtype
    parts = [Ragged.from_sizes(np.empty(held.sum(), kind), held) for held in sizes]
    for clients in owned.blocks():
        samples = owned.of(clients)
        held = owned.sizes[clients]
        # Numbers are drawn even if nothing is split off, so that later draws stay the same.
        draws = rng.random(len(samples))
        if not any(shares):
            continue
        owner = np.repeat(np.arange(clients.start, clients.stop), held)
        held_labels = None
        if labels is not None:
            held_labels = labels[samples]
        order = _stratified_order(owner, held_labels, draws)
        # The first samples of each client, in stratified order, are the first part, and so on.
        part = np.empty(len(order), np.int8)
        numbers = np.tile(np.arange(len(sizes), dtype=np.int8), len(held))
        part[order] = np.repeat(numbers, sizes[:, clients].T.ravel())
        for number, ragged in enumerate(parts):
            mine = samples[part == number]
            begin = ragged.starts[clients.start]
            ragged.indices[begin : begin + len(mine)] = mine
    if not any(shares):
        parts[-1] = Ragged.from_sizes(owned.flat, owned.sizes)
    return [*parts]


def _split_drawn(
    owned: Drawn, labels: np.ndarray | None, shares: tuple[float, ...], rng: Generator
) -> list[IndexArrays]:
    key = int(rng.integers(1 << 63))
    begin = 0
    if labels is not None:
        labels = labels[: owned.total]
    parts: list[IndexArrays] = []
    for size in part_sizes(np.array([owned.size]), shares)[:, 0].tolist():
        parts.append(DrawnPart(key, len(owned), size, owned.total, owned, labels, begin))
        begin += size
    if not any(shares):
        parts[-1] = owned
    return parts


@dataclass(frozen=True, eq=False)
class DrawnPart(Drawn):
    """A part of every client's samples, computed on access.

    Parts with the same key and the same whole are disjoint if their ranges are.

    Attributes:
        whole: All samples of each client.
        labels: The class of every sample, int64 [total], for stratification; None splits at random.
        begin: The part has the range `begin` to `begin + size` of a client's samples in stratified
            order.
    """

    whole: Drawn
    labels: np.ndarray | None
    begin: int

    @property
    def width(self) -> int:
        return 2 * self.whole.width

    def rows(self, clients: np.ndarray) -> np.ndarray:
        if not self.size:
            return np.empty((len(clients), 0), self.dtype)
        samples = self.whole.rows(clients)
        bits = random_bits(self.key, clients, range(self.whole.size))
        draws = bits >> np.uint64(64 - _DRAW_BITS)
        owner = np.repeat(np.arange(len(clients)), self.whole.size)
        label = None
        if self.labels is not None:
            label = self.labels[samples.ravel()]
        order = _stratified_order(owner, label, draws.ravel() * 2.0**-_DRAW_BITS)
        mine = order.reshape(samples.shape)[:, self.begin : self.begin + self.size]
        return samples.ravel()[np.sort(mine, axis=1)]

    def definition(self) -> tuple[np.ndarray, ...]:
        labels = np.empty(0, np.int64)
        if self.labels is not None:
            labels = self.labels
        return *self.whole.definition(), *super().definition(), np.array([self.begin]), labels


def part_sizes(held: np.ndarray, shares: tuple[float, ...]) -> np.ndarray:
    """Returns the sizes of the parts, int64 [len(shares) + 1, M]; see `Protocol` for the rule."""
    left = held.copy()
    parts = []
    for share in shares:
        rounded = np.floor(share * held + 0.5).astype(np.int64)
        part = np.minimum(np.maximum(rounded, share > 0), np.maximum(left - 1, 0))
        left = left - part
        parts.append(part)
    return np.stack([*parts, left])


def _stratified_order(
    client: np.ndarray, label: np.ndarray | None, draws: np.ndarray
) -> np.ndarray:
    """Orders samples by client such that the first n samples of a client are stratified for any n.

    The j-th of the g samples of a class (j = 0, 1, ..., in random order) gets the position
    (j + 1/2) / g. Sorted by position, the first n samples hold a share of every class that is
    rounded by Sainte-Laguë's method. Ties are broken at random, by uniform `draws`. Clients ascend;
    without labels the order is random. All arrays, and the permutation, are [n].
    """
    # One stable sort by (client, fraction). The rounding of their sum does no harm, as clients are
    # numbered below 2^31 and already in ascending order.
    order = np.argsort(client + draws, kind="stable")
    if label is None or not len(order):
        return order
    groups = (client[order] - client[0]) * (label.max() + 1) + label[order]
    by_group = stable_argsort(groups)
    first = np.flatnonzero(np.diff(groups[by_group], prepend=-1))
    size = np.diff(first, append=len(order))
    place = np.empty(len(order))
    place[by_group] = (np.arange(len(order)) - np.repeat(first, size) + 0.5) / np.repeat(size, size)
    return order[np.argsort(client[order] + place, kind="stable")]
