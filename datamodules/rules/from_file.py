"""A partition that was made before, as a rule."""

import os

import numpy as np
from numpy.random import Generator

from ..errors import ConfigError, require_value
from ..partitions.index_arrays import IndexArrays, Ragged
from ..partitions.partition import Partition, read_partition, targets_hash
from ..protocols.protocol import Pool, Protocol
from .partitioner import Partitioner


class Given(Partitioner):
    """The partition of a file that `Partition.save` or `pfl partition` wrote, with its splits.

    Every client has the training, validation and test samples of the file: neither the seed nor the
    protocol changes them. The data set must be the one that was partitioned: its number of samples
    and the hash of its targets are compared.

    Example:
        >>> import tempfile
        >>> from pfl.datamodules import DigitsDataModule, Dirichlet
        >>> file = tempfile.mkdtemp() + "/digits.npz"
        >>> first = DigitsDataModule(num_clients=8, partition=Dirichlet(0.3), seed=5)
        >>> first.partition.save(file)
        >>> again = DigitsDataModule(num_clients=None, partition=Given(file))
        >>> again.num_clients, again.partition.hash == first.partition.hash
        (8, True)
    """

    counts_clients = True
    overlaps = True  # the file says how many samples do

    def __init__(self, file: str | os.PathLike) -> None:
        self.file = os.fspath(file)
        self._partition = read_partition(file)

    def count(self) -> int:
        return len(self._partition)

    def assign(self, targets: np.ndarray, num_clients: int, rng: Generator) -> IndexArrays:
        stored = self._partition
        about = self._partition.about
        found = (len(targets), targets_hash(targets))
        expected = (about.get("samples"), about.get("targets_hash"))
        if found != expected:
            raise ConfigError(
                f"Given.file: {self.file!r} is a partition of {about.get('data', 'data')} with "
                f"{expected[0]} samples (hash of the targets {str(expected[1])[:8]}); it must be "
                f"one of this data set with {found[0]} samples ({found[1][:8]})"
            )
        clients = f"{len(stored)} or null, as in {self.file!r}"
        require_value("num_clients", num_clients, num_clients == len(stored), clients)
        parts = [part for part in (stored.train, stored.val, stored.test) if not part.is_shared]
        owner = np.concatenate([part.owners for part in parts])
        sample = np.concatenate([part.flat for part in parts])
        order = np.lexsort((sample, owner))
        return Ragged.from_sizes(sample[order], np.bincount(owner, minlength=len(stored)))

    def client_names(self, owned: IndexArrays) -> list[str] | None:
        return self._partition.about.get("client_names")

    def protocol(self, given: Protocol | None) -> "StoredSplits":
        """Returns the file's splits as a protocol; the user may have `given` the same one."""
        known = str(self._partition.about.get("protocol"))
        expected = f"left out or null, as {self.file!r} has the splits, made with {known}"
        require_value("protocol", given, given is None or repr(given) == known, expected)
        return StoredSplits(self._partition)

    def describe(self) -> str:
        rule = self._partition.about.get("rule", "a partition")
        seed = self._partition.about.get("seed")
        return f"as in the file {self.file} ({rule}, made with the seed {seed})"


class StoredSplits(Protocol):
    """The training, validation and test samples of a partition that was made before."""

    needs_official_test = False
    assigns_official_test = True

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    def split(self, owned: IndexArrays, pool: Pool, rng: Generator) -> Partition:
        return self._partition

    def describe(self) -> str:
        return f"tested as in that file ({self._partition.about.get('protocol')})"

    def __repr__(self) -> str:
        return "StoredSplits()"
