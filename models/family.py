"""Several networks in one federation: which there are, and which client has which."""

from __future__ import annotations

import copy
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import nn

from .classifier import Classifier, head_name, replace_layer, without_head

BY_RULE = ("turn", "size")


class Family:
    """A network of its own for each client: several networks, and who has which.

    It is given in the place of a network. Methods whose clients send nothing that depends on the
    network (class means of features, a head over the same features) train together all the same;
    the others refuse it in one line.

    Args:
        networks: The networks by name. The server has the first one.
        clients: Who has which. "turn": client i has the (i mod A)-th of A networks. "size": clients
            in the order of their numbers of training samples, the fewest with the first network, in
            groups that differ by at most one client. A mapping from the name of each client to the
            name of its network, or the path of a YAML, JSON or CSV file with such a mapping (a CSV
            file has two columns, the client and the network, and a line above them).
        shares: The share of the clients that each network has, by name, in place of `clients`;
            who has which is drawn from the seed.
        features: The number of features that the heads of all networks get; None: as they are. A
            network with another number gets `reduce` before a new head.
        reduce: How other numbers of features become `features`: "pool", means of neighbouring
            features (`torch.nn.AdaptiveAvgPool1d`, as HtFLlib does it), or "linear", a linear layer
            that is trained with the body.

    Raises:
        ValueError: There is no network, or the arguments do not fit each other.

    Example:
        >>> from pfl.models import MLP
        >>> family = Family({"small": MLP(64, (8,)), "large": MLP(64, (32, 16))}, features=8)
        >>> [network.head.in_features for network in family.networks.values()]
        [8, 8]
        >>> family.assign(["a", "b", "c"], np.array([5, 9, 7])).tolist()
        [0, 1, 0]
    """

    def __init__(
        self,
        networks: Mapping[str, Classifier | nn.Module],
        *,
        clients: str | Mapping[str, str] = "turn",
        shares: Mapping[str, float] | None = None,
        features: int | None = None,
        reduce: str = "pool",
    ) -> None:
        if not networks:
            raise ValueError("Family.networks: it is empty; give at least one network")
        if reduce not in ("pool", "linear"):
            raise ValueError(f"Family.reduce: {reduce!r}; it must be 'pool' or 'linear'")
        if shares is not None:
            _check_shares(shares, networks)
            if clients != "turn":
                raise ValueError("Family.shares: clients says who has which; leave one of them out")
        self.networks = dict(networks)
        self.clients = clients
        self.shares = shares
        if features is not None:
            if features < 1:
                raise ValueError(f"Family.features: {features}; it must be at least 1")
            for name, network in self.networks.items():
                self.networks[name] = _with_features(name, network, features, reduce)

    @property
    def names(self) -> list[str]:
        """The names of the networks, in their order."""
        return list(self.networks)

    def assign(
        self, clients: Sequence[str], sizes: np.ndarray, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Returns the number of each client's network, int64 [M].

        Args:
            clients: The names of the M clients.
            sizes: Their numbers of training samples, int64 [M].
            rng: Draws who has which where there are `shares`.

        Raises:
            ValueError: A client has no network, or one that is not there.
        """
        count = len(self.networks)
        total = len(clients)
        if self.shares is not None:
            rng = rng or np.random.default_rng(0)
            return self._drawn(total, rng)
        if self.clients == "turn":
            return np.arange(total) % count
        if self.clients == "size":
            order = np.argsort(sizes, kind="stable")
            numbers = np.empty(total, np.int64)
            for number, group in enumerate(np.array_split(order, count)):
                numbers[group] = number
            return numbers
        given = self.clients
        if isinstance(given, str):
            given = _read(Path(given).expanduser())
        missing = [name for name in clients if name not in given]
        if missing:
            raise ValueError(
                f"Family.clients: it names no network for client {missing[0]!r}, one of "
                f"{len(missing)}; give one of {', '.join(self.names)}"
            )
        for name in clients:
            if given[name] not in self.networks:
                raise ValueError(
                    f"Family.clients: client {name!r} has {given[name]!r}, which is none of the "
                    f"networks {', '.join(self.names)}"
                )
        return np.array([self.names.index(given[name]) for name in clients], np.int64)

    def _drawn(self, total: int, rng: np.random.Generator) -> np.ndarray:
        """Returns networks in a random order, as many of each as its share says, rounded."""
        assert self.shares is not None
        parts = np.array([self.shares.get(name, 0.0) for name in self.names])
        ends = np.rint(np.cumsum(parts / parts.sum()) * total).astype(np.int64)
        numbers = np.searchsorted(ends, np.arange(total), side="right")
        return rng.permutation(numbers)


def _check_shares(shares: Mapping[str, float], networks: Mapping[str, object]) -> None:
    for name, share in shares.items():
        if name not in networks:
            raise ValueError(
                f"Family.shares: {name!r} is none of the networks {', '.join(networks)}"
            )
        if not 0 <= share < float("inf"):
            raise ValueError(f"Family.shares: {name}: {share}; it must be at least 0 and finite")
    if not any(shares.values()):
        raise ValueError("Family.shares: all are 0; one must be above 0")


def _with_features(name: str, network: nn.Module, features: int, reduce: str) -> nn.Module:
    """Returns a copy of a network whose head gets so many features."""
    network = copy.deepcopy(network)
    place = head_name(network)
    head = network.get_submodule(place)
    if not isinstance(head, nn.Linear) or not place:
        raise ValueError(
            f"Family.features: the head of the network {name!r} is a {type(head).__name__}; it "
            f"must be a linear layer after others"
        )
    if head.in_features == features:
        return network
    reduced: nn.Module = nn.AdaptiveAvgPool1d(features)
    if reduce == "linear":
        reduced = nn.Linear(head.in_features, features)
    new = nn.Linear(features, head.out_features, bias=head.bias is not None)
    body = getattr(network, "body", None)
    if place == "head" and isinstance(body, nn.Module):
        network.body = nn.Sequential(body, reduced)
        network.head = new
    elif place == "head":  # a network of the user's own
        return Classifier(nn.Sequential(without_head(network)[0], reduced), new)
    else:
        replace_layer(network, place, nn.Sequential(reduced, new))
    return network


def _read(path: Path) -> dict[str, str]:
    """Returns the mapping from clients to networks in a file."""
    try:
        text = path.read_text()
    except OSError as error:
        rules = " or ".join(f"{rule!r}" for rule in BY_RULE)
        raise ValueError(
            f"Family.clients: {str(path)!r} is neither {rules} nor a file: {error.strerror}"
        ) from error
    if path.suffix == ".csv":
        rows = list(csv.reader(text.splitlines()))[1:]
        wrong = [row for row in rows if len(row) != 2]
        if wrong:
            raise ValueError(f"Family.clients: {path}: {wrong[0]} must be a client and a network")
        return {client: network for client, network in rows}
    import yaml  # networks without such a file need PyTorch and NumPy alone

    content = yaml.load(text, Loader=yaml.BaseLoader)  # names stay text, as 007
    if not isinstance(content, dict):
        raise ValueError(f"Family.clients: {path} must have a mapping from clients to networks")
    return {str(client): str(network) for client, network in content.items()}
