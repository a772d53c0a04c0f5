"""fluke (github.com/makgyver/fluke): whole runs of its algorithms.

Given are the loaders, whose order of samples is ours, and the cohorts; the iterates are recorded
where it evaluates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    BODY,
    CLASSES,
    COHORTS,
    EPOCHS,
    EVERYONE,
    HEAD_EPOCHS,
    RATE,
    ROUNDS,
    Epochs,
    Iterates,
    Problem,
    first_network,
    main,
    tensors,
    vector,
)

Purposes = list[tuple[str, int]]
TRAIN = [("train", EPOCHS)]


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of all methods."""
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(checkout))
    from fluke import DDict
    from fluke.algorithms import CentralizedFL, fedrep
    from fluke.algorithms.apfl import APFL
    from fluke.algorithms.ditto import Ditto
    from fluke.algorithms.fedamp import FedAMP
    from fluke.algorithms.fedbabu import FedBABU
    from fluke.algorithms.feddyn import FedDyn
    from fluke.algorithms.fedopt import FedOpt
    from fluke.algorithms.fedper import FedPer
    from fluke.algorithms.fedprox import FedProx
    from fluke.algorithms.lg_fedavg import LGFedAVG
    from fluke.algorithms.per_fedavg import PerFedAVG
    from fluke.algorithms.pfedme import PFedMe
    from fluke.algorithms.scaffold import SCAFFOLD
    from fluke.data import FastDataLoader
    from fluke.nets import EncoderHeadNet

    now = SimpleNamespace(round=0)

    class Loader(FastDataLoader):
        """A client's loader: the epochs of a round, one after another."""

        def __init__(self, client: int, purposes: Purposes) -> None:
            samples = tensors(problem.inputs[client], problem.targets[client])
            super().__init__(*samples, num_labels=CLASSES)
            self.client, self.purposes, self.begun = client, purposes, -1

        def epochs(self) -> Epochs:
            if self.begun != now.round:
                self.begun = now.round
                self.coming = Epochs(problem, now.round, self.client, self.purposes, tensors)
            return self.coming

        def __len__(self) -> int:
            return len(self.epochs())

        def __iter__(self) -> Iterator[Any]:
            self.batches = iter(self.epochs())
            return self.batches

        def __next__(self) -> Any:  # they ask the loader itself, and begin anew after the last
            return next(self.batches)

    def network() -> nn.Module:
        first = first_network(problem.start)
        made: nn.Module = EncoderHeadNet(first[:2], first[2])
        return made

    def run(
        kind: Any,
        purposes: Purposes = TRAIN,
        part: str = "",
        optimizer: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        **client: Any,
    ) -> Iterates:
        """The iterates of an algorithm; the server has the whole network, or a part of it."""
        loaders = [Loader(i, purposes) for i in EVERYONE]
        splitter = SimpleNamespace(assign=lambda n, size: ((loaders, [None] * n), None))
        settings = DDict(
            client=DDict(
                batch_size=1,
                local_epochs=EPOCHS,
                loss=nn.CrossEntropyLoss,
                optimizer=DDict(**{"name": "SGD", "lr": RATE} | (optimizer or {})),
                scheduler=DDict(name="StepLR", step_size=1, gamma=1),
                model=network(),
            ),
            server=DDict(**{"weighted": False} | (server or {})),
            model=getattr(network(), part) if part else network(),
        )
        settings.client.update(**client)
        if kind is FedRep:  # its clients make their own models from a name
            settings.client.update(model="network")
        elif not issubclass(kind, personal):
            settings.client = settings.client.exclude("model")
        algorithm = kind(len(EVERYONE), splitter, settings)
        rows: list[dict[str, np.ndarray]] = []

        def cohort(share: float) -> list[Any]:
            now.round = len(rows)
            return [algorithm.clients[i] for i in COHORTS[now.round]]

        def record(*args: object) -> None:
            rows.append({"w": vector(algorithm.server.model.parameters())})
            models = [client.local_model for client in algorithm.clients]
            v = [problem.start if m is None else vector(m.parameters()) for m in models]
            rows[-1]["v"] = np.stack(v)
            if part:  # what the server has is shared, and what it lacks is the client's own
                shared = slice(None, BODY) if part == "encoder" else slice(BODY, None)
                rows[-1]["v"][:, shared] = rows[-1]["w"]
            if kind is SCAFFOLD:
                rows[-1]["server c"] = vector(algorithm.server.control.values())

        algorithm.server.get_eligible_clients = cohort
        algorithm._compute_evaluation = record
        algorithm.finalize = lambda: None
        now.round = 0
        algorithm.run(ROUNDS, 1.0)
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    FedRep = fedrep.FedRep
    vars(fedrep)["get_model"] = lambda name: network()
    personal = (APFL, Ditto, FedAMP, FedBABU, FedPer, LGFedAVG)
    weighted = {"weighted": True}
    adaptive = dict(lr=0.1, beta1=0.9, beta2=0.99, tau=0.01, weighted=True)
    both = [*TRAIN, ("personal", EPOCHS)]
    moreau = dict(name=PFedMe.get_optimizer_class(None), lr=RATE, lamda=2.0, mu=0.001)
    meta = dict(name=PerFedAVG.get_optimizer_class(None), lr=RATE)
    head = [("head", HEAD_EPOCHS), *TRAIN]
    return {
        "FedAvg": run(CentralizedFL, server=weighted),
        "FedProx": run(FedProx, server=weighted, mu=0.3),
        "SCAFFOLD": run(SCAFFOLD),
        "FedDyn": run(FedDyn, server={"alpha": 0.4, "weighted": True}, alpha=0.4, clipping=0),
        "Ditto": run(Ditto, both, server=weighted, tau=EPOCHS, lam=0.5),
        "APFL": run(APFL, lam=0.6),
        "PerFedAvg": run(
            PerFedAVG, [("full 4", EPOCHS)], optimizer=meta, mode="FO", beta=0.3, local_epochs=1
        ),
        "FedRep": run(
            FedRep, head, "encoder", server=weighted, local_epochs=HEAD_EPOCHS, tau=EPOCHS
        ),
        "FedPer": run(FedPer, part="encoder", server=weighted),
        "LGFedAvg": run(LGFedAVG, part="head", server=weighted),
        "FedBABU": run(FedBABU, part="encoder", server=weighted, mode="full", fine_tuning_epochs=0),
        "pFedMe": run(PFedMe, optimizer=moreau, server={"beta": 0.8}, k=3),
        "FedAMP": run(FedAMP, server={"sigma": 5.0, "alpha": 1.0}, lam=0.05),
        "FedAdam": run(FedOpt, server=dict(mode="adam", **adaptive)),
        "FedYogi": run(FedOpt, server=dict(mode="yogi", **adaptive)),
        "FedAdagrad": run(FedOpt, server=dict(mode="adagrad", **adaptive)),
    }


if __name__ == "__main__":
    main(theirs)
