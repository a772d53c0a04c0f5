"""Rules that deal the samples to clients so that the clients' labels differ."""

from bisect import bisect_right
from typing import Literal

import numpy as np

from datamodules.errors import ConfigError, check_whole
from datamodules.partition import stable_argsort
from datamodules.partitioners import (
    Partitioner,
    apportion,
    check_min_size,
    even_owners,
)


class Dirichlet(Partitioner):
    r"""Label skew drawn from a Dirichlet distribution, in either convention of the field.

    ``over="clients"``: for each class, the M clients' shares of its samples are drawn from
    :math:`\mathrm{Dir}_M(\alpha, \dots, \alpha)`. Labels and sizes both become unequal. Draws are
    repeated until every client has ``min_size`` samples. Used by Yurochkin et al. 2019 (PFNM),
    Li et al. 2022 (NIID-Bench), PFLlib and Flower. The code of the first three also stops giving
    to a client that already holds the mean size N/M (in Flower an option); ``size_cap=True`` does
    so (classes are then dealt in random order), the default does not.

    ``over="labels"``: each client draws its distribution of the K labels from
    :math:`\mathrm{Dir}_K(\alpha \pi)`, where :math:`\pi` are the shares of the labels in all
    samples and sum to one, and draws its samples by it without replacement. All clients draw at
    once: of a label that is wanted more often than it is there, random wishes are met, and the
    others are drawn again from the labels that are left, renormalised. Sizes differ by at most
    one. This is the convention of Hsu et al. 2019 and of TensorFlow Federated. The codes of FedDyn
    (Acar et al. 2021), FedSLR and FedLab draw from :math:`\mathrm{Dir}_K(\alpha', \dots, \alpha')`:
    with K equally frequent classes that is :math:`\alpha = K \alpha'` here, e.g.
    ``Dirichlet(1.0, over="labels")`` for their 0.1 on CIFAR-10.

    Args:
        alpha: Concentration α; small is skewed, large is near IID.
        over: What the drawn distributions are over.
        min_size: The least number of samples of a client.
        equal_sizes: Give every client exactly N // M samples; the remainder is not used. With
            ``over="clients"`` a client that is full passes its further samples on to the others,
            in proportion to their shares, and classes are dealt in random order.
        size_cap: With ``over="clients"``: a client that holds N/M samples gets none of the
            following classes.
        max_retries: How many draws to make before giving up on ``min_size``.

    Raises:
        ConfigError: An argument is out of range, the targets are not classes, or (when dealing)
            ``min_size`` was not reached in ``max_retries`` draws.
    """

    def __init__(
        self,
        alpha: float,
        over: Literal["clients", "labels"] = "clients",
        min_size: int = 10,
        equal_sizes: bool = False,
        size_cap: bool = False,
        max_retries: int = 1000,
    ) -> None:
        if not (0 < alpha < np.inf):
            raise ConfigError(f"alpha={alpha} of Dirichlet must be a finite number above 0")
        if over not in ("clients", "labels"):
            raise ConfigError(f"over={over!r} of Dirichlet must be 'clients' or 'labels'")
        if size_cap and (over == "labels" or equal_sizes):
            raise ConfigError(
                "size_cap=True of Dirichlet needs over='clients' and equal_sizes=False; with "
                f"over={over!r}, equal_sizes={equal_sizes} sizes are equal anyway"
            )
        self.alpha = alpha
        self.over = over
        self.min_size = check_whole("min_size", min_size, owner="Dirichlet")
        self.equal_sizes = equal_sizes
        self.size_cap = size_cap
        self.max_retries = check_whole("max_retries", max_retries, owner="Dirichlet")

    def owners(self, targets: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client of every sample."""
        labels = class_labels(self, targets)
        available = np.bincount(labels)
        check_min_size(self, len(labels) // num_clients, num_clients, self.min_size)
        if self.over == "labels":
            return _deal(labels, self._counts_by_client(available, num_clients, rng), rng)
        for _ in range(self.max_retries):
            counts = self._counts_by_class(available, num_clients, rng)
            if counts.sum(0).min() >= self.min_size:
                return _deal(labels, counts, rng)
        raise ConfigError(
            f"alpha={self.alpha} of Dirichlet with num_clients={num_clients} did not reach "
            f"min_size={self.min_size} in max_retries={self.max_retries} draws; use a larger "
            "alpha, fewer clients, a lower min_size, size_cap=True or equal_sizes=True"
        )

    def _counts_by_class(
        self, available: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Return how many samples of each class every client gets, [K, M]: over the clients."""
        shares = rng.dirichlet(np.full(num_clients, self.alpha), size=len(available))
        if not self.equal_sizes and not self.size_cap:
            return apportion(shares, available[:, None])
        counts = np.zeros(shares.shape, np.int64)
        held = np.zeros(num_clients, np.int64)
        mean = available.sum() / num_clients
        for label in rng.permutation(len(available)):
            if self.size_cap:
                open_shares = _usable(shares[label], held < mean)
                counts[label] = apportion(open_shares, available[label])
            else:
                counts[label] = _fill(shares[label], available[label], int(mean) - held)
            held += counts[label]
        return counts

    def _counts_by_client(
        self, available: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Return how many samples of each class every client gets, [K, M]: over the labels."""
        total = available.sum()
        shares = rng.dirichlet(self.alpha * available / total, size=num_clients)
        missing = np.full(num_clients, total // num_clients)
        if not self.equal_sizes:
            missing[: total % num_clients] += 1
        left = available.copy()
        counts = np.zeros_like(shares, np.int64)  # [M, K]
        # Every pass uses up a label or gives all clients what they lack: at most K passes.
        while missing.any():
            clients = np.flatnonzero(missing)
            usable = _usable(shares[clients], left > 0)
            usable /= usable.sum(1, keepdims=True)
            wanted = rng.multinomial(missing[clients], usable)
            for label in np.flatnonzero(wanted.sum(0) > left):
                wishes = np.zeros_like(missing)
                wishes[clients] = wanted[:, label]
                met = rng.multivariate_hypergeometric(wishes, left[label])
                wanted[:, label] = met[clients]
            counts[clients] += wanted
            missing[clients] -= wanted.sum(1)
            left -= wanted.sum(0)
        return counts.T

    def describe(self) -> str:
        """Say in words what the rule does."""
        what = {
            "clients": "class proportions over the clients",
            "labels": "label distribution of each client",
        }[self.over]
        equal = self.equal_sizes or self.over == "labels"
        extra = ", equal sizes" if equal else f", at least {self.min_size} samples each"
        capped = ", capped at the mean size" if self.size_cap else ""
        return f"{what} drawn from a Dirichlet distribution (alpha={self.alpha}{extra}{capped})"


class ClassesPerClient(Partitioner):
    """Pathological label skew: every client holds samples of exactly k classes.

    The classes of a client are drawn at random so that all classes have equally many holders,
    give or take one (fewer for a class with too few samples: a class has at most as many holders
    as samples). Every class has a holder if M k >= K; the samples of a class without a holder are
    not used. A class is divided among its holders evenly, give or take one. Used, in variants, by
    NIID-Bench (``#C=k``) and PFLlib (``pat``).

    Args:
        classes: k.

    Raises:
        ConfigError: k is out of range, the targets are not classes, or the data have too few
            samples or classes to give k classes to every client.
    """

    def __init__(self, classes: int = 2) -> None:
        self.classes = check_whole("classes", classes, owner="ClassesPerClient")

    def owners(self, targets: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client of every sample."""
        labels = class_labels(self, targets)
        available = np.bincount(labels)
        if self.classes > len(available):
            raise ConfigError(
                f"classes={self.classes} of ClassesPerClient is more than the {len(available)} "
                "classes of the data"
            )
        most = np.minimum(available, num_clients)
        if most.sum() < self.classes * num_clients:
            raise ConfigError(
                f"classes={self.classes} of ClassesPerClient cannot be given to each of "
                f"num_clients={num_clients}: the data allow {most.sum()} pairs of client and class"
            )
        holders = self._holders(most, num_clients, rng)
        counts = np.zeros(holders.shape, np.int64)
        for label, row in enumerate(holders):
            who = rng.permutation(np.flatnonzero(row))
            if len(who):
                counts[label, who] = np.bincount(even_owners(available[label], len(who)))
        return _deal(labels, counts, rng)

    def _holders(self, most: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return which client holds which class, bool [K, M]."""
        pairs = self.classes * num_clients
        level = (
            bisect_right(
                range(num_clients + 1), pairs, key=lambda n: int(np.minimum(most, n).sum())
            )
            - 1
        )
        places = np.minimum(most, level)
        more = rng.permutation(np.flatnonzero(most > level))
        places[more[: pairs - places.sum()]] += 1
        # Taking the k classes with the most places left always works out (Gale-Ryser), as no
        # class has more places than there are clients; ties are broken at random.
        holders = np.zeros((len(most), num_clients), bool)
        for client in rng.permutation(num_clients):
            chosen = np.argsort(-(places + rng.random(len(most))))[: self.classes]
            holders[chosen, client] = True
            places[chosen] -= 1
        return holders

    def describe(self) -> str:
        """Say in words what the rule does."""
        return f"{self.classes} classes per client (pathological)"


class Shards(Partitioner):
    """Pathological label skew of McMahan et al. 2017 (FedAvg).

    Samples are sorted by label and cut into M s shards of equal size, give or take one; every
    client gets s random shards. A client so has about s labels: a shard that is no longer than
    the rarest class spans at most two.

    Args:
        shards_per_client: s.

    Raises:
        ConfigError: s is out of range, the targets are not classes, or there are fewer samples
            than shards.
    """

    def __init__(self, shards_per_client: int = 2) -> None:
        self.shards_per_client = check_whole("shards_per_client", shards_per_client, owner="Shards")

    def owners(self, targets: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client of every sample."""
        labels = class_labels(self, targets)
        shards = num_clients * self.shards_per_client
        if shards > len(labels):
            raise ConfigError(
                f"shards_per_client={self.shards_per_client} of Shards with "
                f"num_clients={num_clients} makes {shards} shards of {len(labels)} samples; "
                "use fewer"
            )
        client_of_shard = rng.permutation(even_owners(shards, num_clients))
        owners = np.empty(len(labels), np.int64)
        shard = np.sort(even_owners(len(labels), shards))
        owners[_by_label(labels, rng)] = client_of_shard[shard]
        return owners

    def describe(self) -> str:
        """Say in words what the rule does."""
        return f"{self.shards_per_client} shards of samples sorted by label per client"


def class_labels(rule: Partitioner, targets: np.ndarray) -> np.ndarray:
    """Return the classes as 0, 1, ..., K-1, [N]; raise ConfigError if there are none."""
    if targets.ndim != 1 or targets.dtype.kind not in "iub":
        raise ConfigError(
            f"partition={type(rule).__name__} needs one integer label per sample, but the targets "
            f"are {targets.dtype} of shape {targets.shape}; use IID, LogNormal or Natural"
        )
    if targets.dtype.kind != "i" or targets.min() < 0 or targets.max() >= len(targets):
        return np.unique(targets, return_inverse=True)[1]
    present = np.bincount(targets) > 0  # without sorting
    if len(present) > 1 << 16:
        return (np.cumsum(present) - 1)[targets]
    if present.all():
        return targets.astype(np.uint16)
    return (np.cumsum(present) - 1).astype(np.uint16)[targets]


def _by_label(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the order that sorts samples by label, random within a label."""
    shuffled = rng.permutation(len(labels))
    return shuffled[stable_argsort(labels[shuffled])]


def _deal(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Give each client the stated number of random samples of each class.

    Args:
        labels: Integers [N], 0 to K-1.
        counts: int64 [K, M]; its rows sum to at most the number of samples of the class.
        rng: The source of randomness.

    Returns:
        The owner of every sample, int32 [N], -1 for samples that are left over.
    """
    nobody = np.bincount(labels) - counts.sum(1)
    clients = np.append(np.arange(counts.shape[1]), -1).astype(np.int32)
    per_class = np.column_stack([counts, nobody])
    owners = np.empty(len(labels), np.int32)
    owners[_by_label(labels, rng)] = np.repeat(np.tile(clients, len(counts)), per_class.ravel())
    return owners


def _usable(shares: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Set unusable shares to 0; where nothing is left, use all usable ones equally ([..., M])."""
    masked = np.where(usable, shares, 0.0)
    return np.where(masked.sum(-1, keepdims=True) > 0, masked, usable.astype(float))


def _fill(shares: np.ndarray, amount: int, room: np.ndarray) -> np.ndarray:
    """Split ``amount`` by ``shares`` [M] among clients that have ``room`` [M], until all is full.

    What a full client cannot take goes to the others in proportion to their shares.
    """
    taken = np.zeros_like(room)
    left = min(int(amount), int(room.sum()))
    while left:
        wanted = apportion(_usable(shares, taken < room), left)
        given = np.minimum(wanted, room - taken)
        taken += given
        left -= int(given.sum())
    return taken
