"""What HtFLlib computes, method by method, where clients have networks of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from benchmarks.agreement.problem import (
    CLASSES,
    HIDDEN,
    MEMBERS,
    MESSENGER,
    NESTED,
    Iterates,
    start,
    tanh_layers,
)
from benchmarks.agreement.readings import pfllib
from pfl.algorithms import FML, FedDistill, FedKD, FedMRL, FedProto, FedTGP, LGFedAvg
from pfl.method import Clients, FederatedAlgorithm, Message, MessengerMethod, class_sums
from pfl.models.classifier import Classifier
from pfl.models.family import Family

MUTUAL: dict[str, Any] = dict(alpha=0.6, beta=0.3)
DISTILLED: dict[str, Any] = dict(distillation=1.0, first_energy=0.6, last_energy=0.9)
SERVER: dict[str, Any] = dict(penalty=1.5, server_epochs=3, server_batch_size=100, server_lr=0.1)


def layers(widths: tuple[int, ...], features: int, classes: int) -> nn.Module:
    """Linear layers with tanh between them, and a head over so many features."""
    body = nn.Sequential(*tanh_layers(widths))
    if widths[-1] != features:
        body = nn.Sequential(body, nn.AdaptiveAvgPool1d(features))
    return Classifier(body, nn.Linear(features, classes)).double()


def family(classes: int = CLASSES) -> Family:
    """The clients' networks, in turn, made to one number of features."""
    given = {str(widths): layers(widths, widths[-1], classes) for widths in MEMBERS}
    made = Family(given, features=HIDDEN)
    for number, network in enumerate(made.networks.values()):
        start(network.double(), number)
    return made


def messenger(features: int = HIDDEN, classes: int = CLASSES) -> nn.Module:
    """The network common to all."""
    made: nn.Module = start(layers(MESSENGER, features, classes), len(MEMBERS))
    return made


def of_family(kind: type[FederatedAlgorithm], classes: int = CLASSES, **settings: Any) -> Iterates:
    """The iterates of a method whose clients' networks differ."""
    return run(kind, of=family(classes), **settings)


def with_heads(kind: type[FederatedAlgorithm]) -> Iterates:
    """The iterates of LG-FedAvg by their parts."""
    found = of_family(kind)
    return {"client body": found["client head"], "head": found["w"][:, -CLASSES * (HIDDEN + 1) :]}


def with_messenger(
    kind: type[MessengerMethod],
    name: str = "client u",
    features: int = HIDDEN,
    classes: int = CLASSES,
    **settings: Any,
) -> Iterates:
    """The iterates of a method with a messenger."""
    common_network = messenger(features, classes)
    found = of_family(kind, classes, messenger=common_network, **settings)
    own = sum(values.numel() for values in family(classes).networks[str(MEMBERS[0])].parameters())
    size = sum(values.numel() for values in common_network.parameters())
    return {name: found["client head"], "m": found["w"][:, own : own + size]}


class StartedFedTGP(FedTGP):
    """The first values of the vectors and of the network are given instead of drawn."""

    def begin_round(self, round_index: int) -> None:
        if round_index == 0:
            start(self.trainable, 0)


class OldMeansFedTGP(StartedFedTGP):
    """Class means are those of the model before its local steps."""

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        before = clients.state["w"]
        sent = super().client_update(clients, w)["means"]
        sums, _ = class_sums(self.oracle, clients, before, self.shape[0])
        has = (sums[..., :1] > 0).to(before)
        means = torch.cat([has, sums[..., 1:] / sums[..., :1].clamp_min(1)], 2)
        return {"means": replace(sent, values=means.flatten(1))}


def with_prototypes(kind: type[FedTGP]) -> Iterates:
    """The iterates of FedTGP."""
    found = of_family(kind, **SERVER)
    return {"client w": found["client w"], "prototypes": found["server prototypes"]}


class FirstFedMRL(FedMRL):
    """Projectors keep their first values from round to round."""

    def keep_and_send(self, clients: Clients, v: Tensor) -> Message:
        first = self.space.mask(["projection.*"])
        v[:, first] = self.personalized(clients)[:, first]
        return super().keep_and_send(clients, v)


def started_projectors(kind: type[FedMRL]) -> type[FedMRL]:
    """The method with given first values of the projectors."""

    class Started(kind):  # type: ignore[valid-type,misc]
        @staticmethod
        def joint(own: nn.Module, messenger: nn.Module) -> Any:
            made = kind.joint(own, messenger)
            assert made.projection is not None
            start(made.projection, 0)
            return made

    return Started


NESTING: dict[str, Any] = dict(name="client u, P", features=NESTED)

CASES = [
    Case(
        "FedProto",
        "FedProto",
        "clients/clientproto.py:44-63, servers/serverproto.py:80-97",
        ("client w",),
        partial(of_family, FedProto, penalty=1.5),
        "As in PFLlib: class means of the moving model's features, averaged over clients, and a "
        "class that the last cohort lacks has none.",
        partial(of_family, pfllib.RunningFedProto, penalty=1.5),
    ),
    Case(
        "LGFedAvg",
        "LG",
        "clients/clientlg.py:14, servers/serverlg.py:68-83",
        ("client body", "head"),
        partial(with_heads, LGFedAvg),
    ),
    Case(
        "FedDistill (FD)",
        "FD",
        "clients/clientfd.py:42-54, servers/serverfd.py:87-103",
        ("client w",),
        partial(of_family, FedDistill, penalty=0.6),
        "As in PFLlib: scores are averaged and taken for probabilities; a client is among its own "
        "teachers; only the last cohort teaches.",
        partial(of_family, pfllib.ScoresFedDistill, penalty=0.6),
    ),
    Case(
        "FML",
        "FML",
        "clients/clientfml.py:44-56, servers/serverfml.py:73-87",
        ("client u", "m"),
        partial(with_messenger, FML, **MUTUAL),
        "As in PFLlib: each network descends on both losses; the divergence is a mean over "
        "classes, too; messengers have equal weights.",
        partial(with_messenger, pfllib.SummedFML, **MUTUAL),
    ),
    Case(
        "FedKD, four classes of which one is empty",
        "FedKD",
        "clients/clientkd.py:51-83, 129-180, servers/serverkd.py:80-99",
        ("client u, W", "m"),
        partial(with_messenger, FedKD, "client u, W", classes=CLASSES + 1, **DISTILLED),
        "As in PFLlib, but for clients that were not in the last round, whose energy there is that "
        "of the round, too.",
        partial(
            with_messenger, pfllib.SummedFedKD, "client u, W", classes=CLASSES + 1, **DISTILLED
        ),
    ),
    Case(
        "FedTGP, all class means in one step of the server",
        "FedTGP",
        "clients/clienttgp.py:37-83, servers/servertgp.py:84-154",
        ("client w", "prototypes"),
        partial(with_prototypes, StartedFedTGP),
        "Class means are those of the model before its local steps, which is saved after them "
        "(60). The authors' own repository has the same lines.",
        partial(with_prototypes, OldMeansFedTGP),
    ),
    Case(
        "FedMRL",
        "FedMRL",
        "clients/clientmrl.py:46-67, servers/servermrl.py:75-90",
        ("client u, P", "m"),
        partial(with_messenger, started_projectors(FedMRL), **NESTING),
        "The projector is trained, but not saved (70-71): each round begins with the first one, "
        "and predictions have it. Messengers have equal weights.",
        partial(with_messenger, started_projectors(FirstFedMRL), weighting="uniform", **NESTING),
    ),
]
