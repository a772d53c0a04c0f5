"""HtFLlib (github.com/TsingZ0/HtFLlib): whole runs of its servers and clients.

Clients have one of two networks, made to one number of features by its `BaseHeadSplit`. Replaced
are the files in which it keeps models and the reading of data, the first values of networks, the
draw of cohorts, the order of samples (its loaders have one order, and drop the last samples of an
epoch) and the evaluation, where the iterates are recorded instead.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.drivers import pfllib
from benchmarks.agreement.problem import (
    CLASSES,
    COHORTS,
    EPOCHS,
    EVERYONE,
    HIDDEN,
    MEMBERS,
    MESSENGER,
    NESTED,
    RATE,
    ROUNDS,
    Done,
    Epochs,
    Iterates,
    Problem,
    absent,
    main,
    padded,
    start,
    tanh_layers,
    tensors,
    vector,
)

SETTINGS: dict[str, Any] = pfllib.SETTINGS | dict(
    save_folder_name="temp",
    models_folder_name="",
    models=[f"Layers({widths})" for widths in MEMBERS],
    global_model=f"Layers({MESSENGER})",
    feature_dim=HIDDEN,
)


class Layers(nn.Module):
    """Linear layers with tanh between them; `fc` is what `BaseHeadSplit` replaces."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*tanh_layers(widths))
        self.fc = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.fc(self.layers(x))
        return features


class Runner:
    """Runs servers of a checkout."""

    def __init__(self, problem: Problem, checkout: Path) -> None:
        self.problem = problem
        self.kept: dict[tuple[str, str], Any] = {}  # in place of files
        sys.path.insert(0, str(checkout / "system"))
        absent("h5py", "torchvision")
        torch.set_default_dtype(torch.float64)
        vars(importlib.import_module("utils.data_utils"))["read_client_data"] = self.samples
        networks = importlib.import_module("flcore.trainmodel.models")
        vars(networks)["Layers"] = Layers
        split = networks.BaseHeadSplit

        class Started(split):  # type: ignore[valid-type,misc]
            def __init__(self, args: Any, cid: int = 0, *rest: Any, **given: Any) -> None:
                super().__init__(args, cid, *rest, **given)
                number = cid % len(args.models)
                if given.get("is_global"):
                    number = len(args.models)
                start(self, number)

        vars(networks)["BaseHeadSplit"] = Started
        self.base = importlib.import_module("flcore.clients.clientbase")
        vars(self.base).update(save_item=self.save, load_item=self.load)

    def samples(self, dataset: str, i: int, **kwargs: object) -> list[tuple[Tensor, Tensor]]:
        return list(zip(*tensors(self.problem.inputs[i], self.problem.targets[i]), strict=True))

    def save(self, item: Any, role: str, name: str, folder: str) -> None:
        self.kept[role, name] = copy.deepcopy(item)

    def load(self, role: str, name: str, folder: str) -> Any:
        return copy.deepcopy(self.kept.get((role, name)))

    def __call__(
        self,
        module: str,
        server: str,
        found: Callable[[], dict[str, np.ndarray]],
        setup: Callable[[], None] = lambda: None,
        **settings: object,
    ) -> Iterates:
        """The iterates of a server.

        Args:
            module: Of the server.
            server: Its class.
            found: What there is when a round begins.
            setup: Called when the clients are there.
            settings: Arguments of the command line.
        """
        self.kept.clear()
        rounds: list[dict[str, np.ndarray]] = []
        cohorts = list(COHORTS)

        def select() -> list[Any]:
            if not cohorts:
                return run.clients  # the round after the last one, which never trains
            return [run.clients[i] for i in cohorts.pop(0)]

        def load(client: Any, batch_size: int | None = None) -> Epochs:
            now = max(0, ROUNDS - len(cohorts) - 1)
            # FedTGP reads all samples once more, for the class means.
            return Epochs(self.problem, now, client.id, [("train", EPOCHS)], tensors)

        def record(*args: object) -> None:
            rounds.append(found() if rounds else {})
            run.rs_test_acc.append(0.0)  # a score, whose maximum is printed
            if len(rounds) > ROUNDS:
                raise Done

        self.base.Client.load_train_data = load
        made = getattr(importlib.import_module(f"flcore.servers.{module}"), server)
        run = made(SimpleNamespace(**SETTINGS | settings), 0)
        run.select_clients = select
        run.evaluate = record
        setup()
        with contextlib.suppress(Done):
            run.train()
        return {name: np.stack([row[name] for row in rounds[1:]]) for name in rounds[1]}

    def of_clients(self, *items: str, part: str = "") -> np.ndarray:
        """The values of modules of all clients, one after the other, with zeros at the end."""
        rows = []
        for i in EVERYONE:
            modules = [self.kept[f"Client_{i}", item] for item in items]
            values = [p for module in modules for p in module.get_submodule(part).parameters()]
            rows.append(vector(values))
        return padded(rows)

    def of_server(self, item: str) -> np.ndarray:
        """The values of a module of the server."""
        return vector(self.kept["Server", item].parameters())

    def prototypes(self) -> np.ndarray:
        """The prototypes of all classes at the server."""
        known = self.kept["Server", "global_protos"]
        return torch.stack([known[label] for label in range(CLASSES)]).numpy()


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of all methods."""
    run = Runner(problem, checkout)

    def models() -> dict[str, np.ndarray]:
        return {"client w": run.of_clients("model")}

    def with_messenger() -> dict[str, np.ndarray]:
        return {"client u": run.of_clients("model"), "m": run.of_server("global_model")}

    def identities() -> None:
        for i in EVERYONE:
            nn.init.eye_(run.kept[f"Client_{i}", "W_h"].weight)

    def prototypes() -> None:
        start(run.kept["Server", "TGP"], 0)

    def projectors() -> None:
        for i in EVERYONE:
            start(run.kept[f"Client_{i}", "proj"], 0)

    return {
        "FedProto": run("serverproto", "FedProto", models, lamda=1.5),
        "LG": run(
            "serverlg",
            "LG_FedAvg",
            lambda: {
                "client body": run.of_clients("model", part="base"),
                "head": run.of_server("head"),
            },
        ),
        "FD": run("serverfd", "FD", models, lamda=0.6),
        "FML": run("serverfml", "FML", with_messenger, alpha=0.6, beta=0.3),
        "FedTGP": run(
            "servertgp",
            "FedTGP",
            lambda: {**models(), "prototypes": run.prototypes()},
            prototypes,
            lamda=1.5,
            server_epochs=3,
            margin_threthold=100.0,
        ),
        "FedKD": run(
            "serverkd",
            "FedKD",
            lambda: {
                "client u, W": run.of_clients("model", "W_h"),
                "m": vector(run.kept["Client_0", "global_model"].parameters()),
            },
            identities,
            num_classes=CLASSES + 1,
            mentee_learning_rate=RATE,
            T_start=0.6,
            T_end=0.9,
        ),
        "FedMRL": run(
            "servermrl",
            "FedMRL",
            lambda: {
                "client u, P": run.of_clients("model", "proj"),
                "m": run.of_server("global_model"),
            },
            projectors,
            sub_feature_dim=NESTED,
        ),
    }


if __name__ == "__main__":
    main(theirs)
