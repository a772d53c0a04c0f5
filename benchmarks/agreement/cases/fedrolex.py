"""What the code of FedRolex's authors computes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.agreement.case import Case
from benchmarks.agreement.cases.heterofl import of_halves
from benchmarks.agreement.problem import (
    CLASSES,
    COHORTS,
    EVERYONE,
    FEATURES,
    HIDDEN,
    ROUNDS,
    arrays,
)
from pfl.algorithms import FedRolex
from pfl.method import Clients, Message


def trained(round_index: int, client: int, masked: bool) -> np.ndarray:
    """Which values of the server's model a client has and trains, 1 or 0, [P]."""
    width = HIDDEN
    if client % 2:
        width = HIDDEN // 2
    units = np.zeros(HIDDEN)
    units[(np.arange(width) - round_index) % HIDDEN] = 1
    classes = np.ones(CLASSES)
    if masked:
        classes = np.isin(np.arange(CLASSES), arrays()[1][client]).astype(float)
    return np.concatenate(
        [np.repeat(units, FEATURES), units, np.outer(classes, units).ravel(), classes]
    )


@lru_cache
def weights(masked: bool) -> np.ndarray:
    """Their weights of values in the mean, [rounds, clients, P], where units roll back.

    A value counts 1 and as often as it was trained before, also by clients of the same round; those
    of the first matrix count 1.
    """
    found = np.zeros((ROUNDS, len(EVERYONE), len(arrays()[2])))
    times = np.ones(len(arrays()[2]))
    for now, cohort in enumerate(COHORTS):
        for i in cohort:
            part = trained(now, i, masked)
            found[now, i] = part * times
            found[now, i, : HIDDEN * FEATURES] = part[: HIDDEN * FEATURES]
            times += part
    return found


class BackwardFedRolex(FedRolex):
    """Parts begin with the unit -t, modulo the number of units."""

    def first_unit(self, round_index: int) -> int:
        return -round_index


class CountedFedRolex(BackwardFedRolex):
    """Values are weighted by how often they were trained before; those of a class by who has it."""

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:  # type: ignore[override]
        message = super().client_update(clients, w)
        table = weights(self.mask_classes)[clients.round, clients.ids]
        counts = torch.from_numpy(table)[:, message.places]
        values = replace(message, values=message.values * counts)
        return {"w": values, "counts": replace(message, values=counts)}

    def server_update(self, received: dict[str, Tensor]) -> None:
        known = torch.from_numpy(weights(self.mask_classes)[self.rounds].sum(0) > 0)
        mean = received["w"] / received["counts"]
        self.global_model.copy_(torch.where(known, mean, self.global_model))


CASES = [
    Case(
        "FedRolex, `mask_classes: false`",
        "FedRolex",
        "resnet_server.py:100-110, 156-220",
        ("w",),
        partial(of_halves, FedRolex, mask_classes=False),
        "Parts roll backwards: that of round t begins with the unit -t, not t (109). In the mean, "
        "values other than those of hidden matrices are weighted by how often they were trained "
        "before, also by clients of the same round (218), so that a later client weighs more.",
        partial(of_halves, CountedFedRolex, mask_classes=False),
    ),
    Case(
        "FedRolex",
        "FedRolex, masked",
        "resnet_server.py:100-110, 156-220",
        ("w",),
        partial(of_halves, FedRolex),
        "As above; and the head's values of a class are averaged over the clients of the round "
        "that have the class.",
        partial(of_halves, CountedFedRolex),
    ),
]
