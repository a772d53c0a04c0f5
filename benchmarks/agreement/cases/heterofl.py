"""What the code of HeteroFL's authors computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import network, run
from benchmarks.agreement.problem import BODY, CLASSES, FEATURES, HIDDEN, Iterates
from pfl.algorithms import HeteroFL
from pfl.method import Clients, Message, NestedNetworks, dense, label_counts
from pfl.models.classifier import Classifier
from pfl.models.family import Family


class OwnRowsHeteroFL(HeteroFL):
    """The head's values of a class are averaged over the clients that have the class alone.

    The others send them as they got them, so that their part of the mean is known.
    """

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:  # type: ignore[override]
        assert self.classes is not None
        has = label_counts(clients, self.classes, w).sign()
        return {"w": super().client_update(clients, w), "has": replace(dense(has), reduce="rows")}

    def server_update(self, received: dict[str, Tensor]) -> None:
        has = received["has"]
        columns = torch.ones(len(has), HIDDEN + 1, dtype=has.dtype)  # and the one of the bias
        columns[torch.from_numpy(self.kinds[self.participant_ids] == 1), HIDDEN // 2 : -1] = 0
        everyone = columns.sum(0)
        with_class = has.T @ columns
        old = _head(self.global_model)
        sums = everyone * _head(received["w"]) - (everyone - with_class) * old
        new = torch.where(with_class > 0, sums / with_class.clamp_min(1), old)
        self.global_model.copy_(received["w"])
        self.global_model[BODY:] = torch.cat([new[:, :-1].flatten(), new[:, -1]])


def _head(w: Tensor) -> Tensor:
    """The values of the head of a model, a row for each class."""
    return torch.cat([w[BODY:-CLASSES].view(CLASSES, HIDDEN), w[-CLASSES:, None]], 1)


def of_halves(kind: type[NestedNetworks] = HeteroFL, **settings: Any) -> Iterates:
    """The iterates where every other client has half of the hidden units."""
    width = HIDDEN // 2
    body = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh())
    half = Classifier(body, nn.Linear(width, CLASSES)).double()
    return run(kind, of=Family({"full": network(), "half": half}), **settings)


CASES = [
    Case(
        "HeteroFL, `mask_classes: false`",
        "HeteroFL",
        "src/fed.py:26-54, 155-205",
        ("w",),
        partial(of_halves, mask_classes=False),
    ),
    Case(
        "HeteroFL",
        "HeteroFL, masked",
        "src/fed.py:165-190",
        ("w",),
        of_halves,
        "The head's values of a class are averaged over the clients of the round that have the "
        "class.",
        partial(of_halves, OwnRowsHeteroFL),
    ),
]
