"""What the code of FedMRL's authors computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from benchmarks.agreement.case import Case
from benchmarks.agreement.cases.htfllib import started_projectors, with_messenger
from pfl.algorithms import FedMRL
from pfl.method import Clients, Message


class LastFedMRL(FedMRL):
    """The new messenger is that of the last client of the round."""

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        return replace(super().client_update(clients, w), reduce="rows")

    def server_update(self, received: dict[str, Tensor]) -> None:
        last = int(self.participant_ids.argmax())  # cohorts are in the order of their numbers
        self.global_model[~self.personal_part] = received["w"][last]


CASES = [
    Case(
        "FedMRL, heads over all features, without momentum",
        "FedMRL",
        "experiments/FLHetero/FedMRL_hetero.py:351, 408-413",
        ("client u, P",),
        partial(with_messenger, started_projectors(FedMRL), "client u, P"),
        "The messengers of a round are kept by reference (351), so that all are the last client's: "
        "nothing is averaged.",
        partial(with_messenger, started_projectors(LastFedMRL), "client u, P"),
    ),
]
