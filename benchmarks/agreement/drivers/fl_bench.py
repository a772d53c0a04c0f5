"""FL-bench (github.com/KarhouTam/FL-bench): its clients, trainer and servers' rounds.

The servers' set-up is replaced, which reads files and the command line, and so is the order of
samples. Aggregation, packages, clients and their local steps are FL-bench's own.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    BATCH,
    BODY,
    CLASSES,
    COHORTS,
    EPOCHS,
    EVERYONE,
    FEATURES,
    HEAD_EPOCHS,
    HIDDEN,
    PUBLIC_PICKS,
    RATE,
    SIZES,
    Epochs,
    Iterates,
    Problem,
    absent,
    main,
    public_inputs,
    starts,
    tensors,
    vector,
)

Purposes = list[tuple[str, int]]
ENDPOINTS, PROJECTION = 3, 2  # of Floco


class Settings(dict[str, Any]):
    """Nested settings whose keys are attributes, as omegaconf's."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Dataset:
    """The classes of all samples; the loader gives these."""

    def __init__(self, problem: Problem) -> None:
        self.targets, self.classes = np.concatenate(problem.targets), list(range(CLASSES))

    def __len__(self) -> int:
        return sum(SIZES)

    def train(self) -> None: ...

    def eval(self) -> None: ...


class Draws:
    """What replaces np.random in their Floco: points of the simplex for a client's turn.

    A direction from a centre is drawn together with the distance, as ours are.
    """

    length = 0.0

    def begin(self, round_index: int, client: int) -> None:
        self.draw = np.random.default_rng([round_index, client])

    def exponential(self, scale: float, size: int) -> np.ndarray:
        return self.draw.exponential(scale, size)

    def uniform(self, low: float, high: float, size: int = 0) -> Any:
        if not size:
            return high * (self.length + 1) / 2
        *direction, self.length = self.draw.uniform(low, high, size + 1)
        return np.array(direction)


class Loader:
    """The trained client's next epoch each time that it is iterated over."""

    def __init__(self, client: Any, purposes: Purposes) -> None:
        self.client, self.purposes = client, purposes
        self.coming: dict[int, Epochs] = {}

    def __len__(self) -> int:
        return len(self.epochs())

    def __iter__(self) -> Iterator[object]:
        return iter(self.epochs())

    def epochs(self) -> Epochs:
        return self.coming[self.client.client_id]


class Runner:
    """Runs rounds of a checkout's servers."""

    def __init__(self, problem: Problem, checkout: Path) -> None:
        torch.set_default_dtype(torch.float64)
        self.problem, self.draws = problem, Draws()
        sys.path.insert(0, str(checkout))
        absent("ray", "ray.actor", "pynvml", "hydra", "hydra.core", "hydra.core.hydra_config")
        absent("rich", "rich.console", "rich.pretty", "rich.progress", "omegaconf")
        sys.modules["omegaconf"].DictConfig = Settings  # type: ignore[attr-defined]
        base: Any = importlib.import_module("src.server.fedavg").FedAvgServer
        base.__init__ = lambda server, args, *given: self.set_up(server, args)
        made = importlib.import_module("src.utils.models").DecoupledModel()
        made.base = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh())
        made.classifier = nn.Linear(HIDDEN, CLASSES)
        nn.utils.vector_to_parameters(torch.from_numpy(problem.start), made.parameters())
        self.network = made

    def set_up(self, server: Any, args: Settings) -> None:
        """What FedAvgServer.__init__ leaves behind, without files."""
        server.args, server.device = args, torch.device("cpu")
        server.client_num = len(SIZES)
        server.train_clients = server.val_clients = server.test_clients = list(EVERYONE)
        server.init_model(copy.deepcopy(self.network))
        server.client_optimizer_states = {i: {} for i in EVERYONE}
        server.client_lr_scheduler_states = {i: {} for i in EVERYONE}
        server.client_local_epoches = [args.common.local_epoch] * len(SIZES)
        server.client_metrics = {i: {} for i in EVERYONE}
        server.testing = server.verbose = False
        server.dataset = Dataset(self.problem)
        ends = np.cumsum(SIZES)
        server.client_data_indices = [
            {"train": list(range(end - n, end)), "val": [], "test": []}
            for n, end in zip(SIZES, ends, strict=True)
        ]
        server.init_trainer()

    def __call__(
        self,
        module: str,
        server: str,
        purposes: Purposes | None = None,
        personal: Callable[[Any, int], Any] | None = None,
        cohorts: Sequence[Sequence[int]] = COHORTS,
        common: dict[str, object] | None = None,
        dataset: str = "given",
        optimizer: dict[str, object] | None = None,
        **settings: object,
    ) -> Iterates:
        """The iterates of a server.

        Args:
            module: Of the server.
            server: Its class.
            purposes: Of the epochs that a client takes in a round.
            personal: The tensors of the personalized model of a client.
            cohorts: The clients of each round.
            dataset: The name of the data.
            common, optimizer: Settings of these sections that differ.
            settings: Those of the method.
        """
        test = Settings(
            client=Settings(train=False, val=False, test=False, finetune_epoch=1),
            server=Settings(interval=-1),
        )
        shared = Settings(
            use_cuda=False,
            buffers="global",
            batch_size=BATCH,
            local_epoch=EPOCHS,
            reset_optimizer_on_global_epoch=True,
            client_side_evaluation=False,
            seed=0,
            test=test,
        )
        args = Settings(
            mode="serial",
            model=Settings(
                name="given",
                external_model_weights_path=None,
                use_torchvision_pretrained_weights=False,
            ),
            dataset=Settings(name=dataset),
            common=Settings(shared | (common or {})),
            optimizer=Settings(dict(name="sgd", lr=RATE) | (optimizer or {})),
            **{module: Settings(settings)},
        )
        run = getattr(importlib.import_module(f"src.server.{module}"), server)(args)
        client = run.trainer.worker
        client.trainloader = loader = Loader(client, purposes or [("train", EPOCHS)])
        rounds: list[dict[str, np.ndarray]] = []
        for self.now, cohort in enumerate(cohorts):
            now = self.now
            loader.coming = {
                i: Epochs(self.problem, now, i, loader.purposes, tensors) for i in cohort
            }
            run.current_epoch, run.selected_clients = now, list(cohort)
            run.train_one_round()
            row = {"w": vector(run.public_model_params.values())}
            if personal is not None:
                row["v"] = np.stack([vector(personal(run, i)) for i in EVERYONE])
            if module == "floco":
                weights = run.model.classifier._weights
                row["server endpoints"] = vector(weights).reshape(ENDPOINTS, -1)
            if hasattr(run, "c_local"):
                row["client c_i"] = np.stack([vector(c) for c in run.c_local])
            if hasattr(run, "c_global"):
                row["server c"] = vector(run.c_global)
            rounds.append(row)
        return {name: np.stack([row[name] for row in rounds]) for name in rounds[0]}


def stored(run: Any, i: int) -> Any:
    """The personalized model that the server keeps for a client."""
    return run.clients_personalized_model_params[i].values()


def with_own_part(run: Any, i: int) -> Any:
    """The server's model with what is the client's own."""
    return (run.public_model_params | run.clients_personal_model_params[i]).values()


def prepare_fedmd(problem: Problem, trained: dict[int, Any]) -> None:
    """FedMD with the given public inputs, one mini-batch in a round.

    Args:
        problem: The problem.
        trained: Gets what each client has trained last.
    """
    there: Any = importlib.import_module("src.server.fedmd")

    class Client(there.FedMDClient):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            if self.args.fedmd.keep:
                self.personal_params_name = list(self.regular_params_name)

        def package(self) -> Any:
            trained[self.client_id] = [p.detach().clone() for p in self.model.parameters()]
            return super().package()

    there.FedMDServer.client_cls = Client
    inputs = torch.from_numpy(public_inputs())
    rounds = range(len(COHORTS))
    picks = [problem.orders["public", now, 0][0][0] for now in rounds]
    there.DATASETS = {"mnist": lambda **given: inputs}
    there.DataLoader = lambda *given, **more: [(inputs[one], None) for one in picks]


def prepare_floco(run: Runner) -> None:
    """Floco with the given first values, and points of the simplex as ours are drawn."""
    there: Any = importlib.import_module("src.server.floco")
    there.MODELS = {"given": lambda dataset, pretrained: copy.deepcopy(run.network)}
    there.NUM_CLASSES = {"given": CLASSES}
    first, heads = run.network, starts(run.problem.start, ENDPOINTS)[:, BODY:-CLASSES]

    class Simplex(there.SimplexModel):
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            self.classifier.bias.data.copy_(first.classifier.bias.data)
            for weight, given in zip(self.classifier._weights, heads, strict=True):
                weight.data.copy_(torch.from_numpy(given).view_as(weight))

    def fit(client: Any) -> None:  # clients have two turns in one round
        i, loader = client.client_id, client.trainloader
        loader.coming[i] = Epochs(run.problem, run.now, i, loader.purposes, tensors)
        run.draws.begin(run.now, i)
        their_fit(client)

    their_fit, there.FlocoClient.fit = there.FlocoClient.fit, fit
    there.SimplexModel = Simplex
    there.np = SimpleNamespace(**vars(np) | {"random": run.draws})


def at_point(run: Any, i: int) -> Any:
    """The model at the client's point of the simplex, or at its centre."""
    points = run.projected_clients
    layer = run.model.classifier
    layer.alphas = [1 / ENDPOINTS] * ENDPOINTS if points is None else points[i]
    return [*run.model.base.parameters(), layer.weight, layer.bias]


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of all methods."""
    run = Runner(problem, checkout)
    prepare_floco(run)
    trained: dict[int, Any] = {}
    prepare_fedmd(problem, trained)

    def of_public(keep: bool) -> Iterates:
        first = list(run.network.parameters())
        trained.clear()
        return run(
            "fedmd",
            "FedMDServer",
            personal=lambda server, i: trained.get(i, first),
            dataset="femnist",
            keep=keep,
            digest_epoch=EPOCHS,
            public_dataset="mnist",
            public_batch_size=PUBLIC_PICKS,
            public_batch_num=1,
        )

    both = [("train", EPOCHS), ("personal", EPOCHS)]
    head = [("head", HEAD_EPOCHS), ("train", EPOCHS)]
    moreau: dict[str, Any] = dict(lamda=2.0, k=3, pers_lr=0.1, beta=0.8, mu=0.001)
    adaptive: dict[str, Any] = dict(beta1=0.9, beta2=0.99, server_lr=0.1, tau=0.01)
    return {
        "FedAvg": run("fedavg", "FedAvgServer"),
        "FedProx": run("fedprox", "FedProxServer", mu=0.3),
        "SCAFFOLD": run(
            "scaffold", "SCAFFOLDServer", [("train", 4)], common={"local_epoch": 4}, global_lr=1.0
        ),
        "FedDyn": run("feddyn", "FedDynServer", alpha=0.4, max_grad_norm=10.0),
        "FedDyn, weight decay": run(
            "feddyn",
            "FedDynServer",
            optimizer={"weight_decay": 0.4},
            alpha=0.4,
            max_grad_norm=10.0,
        ),
        "Ditto": run("ditto", "DittoServer", both, stored, pers_epoch=EPOCHS, lamda=0.5),
        "APFL": run("apfl", "APFLServer", alpha=0.6, adaptive_alpha=0),
        "PerFedAvg FO": run(
            "perfedavg", "PerFedAvgServer", [("full 2", EPOCHS)], version="fo", beta=0.3, delta=1e-3
        ),
        "PerFedAvg HF": run(
            "perfedavg", "PerFedAvgServer", [("full 3", EPOCHS)], version="hf", beta=0.3, delta=1e-3
        ),
        "FedRep": run(
            "fedrep",
            "FedRepServer",
            head,
            with_own_part,
            common={"local_epoch": HEAD_EPOCHS + EPOCHS},
            train_body_epoch=EPOCHS,
        ),
        "FedPer": run("fedper", "FedPerServer", personal=with_own_part),
        "LGFedAvg": run("lgfedavg", "LGFedAvgServer", personal=with_own_part, num_global_layers=1),
        "FedBABU": run("fedbabu", "FedBabuServer"),
        "FedBABU, weight decay": run("fedbabu", "FedBabuServer", optimizer={"weight_decay": 0.2}),
        "pFedMe": run("pfedme", "pFedMeServer", personal=stored, **moreau),
        "MOON": run("moon", "MOONServer", tau=0.5, mu=2.0),
        **{name: of_public(keep) for name, keep in (("FedMD", False), ("FedMD, kept", True))},
        "FedLC": run("fedlc", "FedLCServer", tau=0.8),
        "CFL": run(
            "cfl",
            "CFLServer",
            personal=with_own_part,
            cohorts=[EVERYONE] * len(COHORTS),
            eps_1=10.0,
            eps_2=0.1,
            min_cluster_size=2,
            start_clustering_round=2,
        ),
        "Floco": run(
            "floco",
            "FlocoServer",
            personal=at_point,
            endpoints=ENDPOINTS,
            tau=PROJECTION,
            rho=0.1,
            pers_epoch=0,
        ),
        "FedAdagrad": run("fedopt", "FedOptServer", type="adagrad", **adaptive),
        "FedAdam": run("fedopt", "FedOptServer", type="adam", **adaptive),
        "FedYogi": run("fedopt", "FedOptServer", type="yogi", **adaptive),
    }


if __name__ == "__main__":
    main(theirs)
