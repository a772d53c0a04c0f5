"""PFLlib (github.com/TsingZ0/PFLlib): whole runs of its servers and clients.

Replaced are the reading of files, the draw of cohorts, the order of samples (its loaders shuffle,
and drop the last samples of an epoch) and the evaluation, where the iterates are recorded instead.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    CLASSES,
    COHORTS,
    EPOCHS,
    EVERYONE,
    FEATURES,
    GENERATOR,
    HEAD_EPOCHS,
    HIDDEN,
    MADE,
    NOISE,
    RATE,
    ROUNDS,
    SIZES,
    Done,
    Epochs,
    Iterates,
    MadeFeatures,
    Problem,
    absent,
    main,
    start,
    tensors,
    vector,
)

TRAIN = [("train", EPOCHS)]
FEATURES_MADE: dict[str, Any] = dict(
    batch_size=MADE,
    noise_dim=NOISE,
    hidden_dim=GENERATOR,
    generator_learning_rate=0.05,
    server_epochs=3,
    localize_feature_extractor=False,
)
SETTINGS = dict(
    algorithm="",
    dataset="",
    device="cpu",
    save_folder_name="",
    num_classes=CLASSES,
    batch_size=1 << 20,
    local_learning_rate=RATE,
    local_epochs=EPOCHS,
    few_shot=0,
    learning_rate_decay=False,
    learning_rate_decay_gamma=1.0,
    global_rounds=ROUNDS,
    num_clients=len(SIZES),
    join_ratio=len(COHORTS[0]) / len(SIZES),
    random_join_ratio=False,
    time_select=False,
    goal="",
    time_threthold=1e9,
    top_cnt=100,
    auto_break=False,
    eval_gap=1,
    client_drop_rate=0.0,
    train_slow_rate=0.0,
    send_slow_rate=0.0,
    dlg_eval=False,
    dlg_gap=1,
    batch_num_per_client=1,
    num_new_clients=0,
    fine_tuning_epoch_new=0,
    server_learning_rate=1.0,
    plocal_epochs=HEAD_EPOCHS,
    fine_tuning_epochs=1,
)


def doubled(inputs: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
    """All samples for the first gradient of a step, and again for the second."""
    return tensors(np.concatenate([inputs, inputs]), np.concatenate([targets, targets]))


class Runner:
    """Runs servers of a checkout."""

    def __init__(self, problem: Problem, checkout: Path) -> None:
        self.problem = problem
        sys.path.insert(0, str(checkout / "system"))
        absent("h5py")
        vars(importlib.import_module("utils.data_utils"))["read_client_data"] = self.samples
        self.client_base = importlib.import_module("flcore.clients.clientbase")
        self.network = self.with_classes(CLASSES)
        first = torch.from_numpy(problem.start)
        nn.utils.vector_to_parameters(first, self.network.parameters())

    @staticmethod
    def with_classes(count: int) -> nn.Module:
        """The problem's network with any number of classes."""
        split = importlib.import_module("flcore.trainmodel.models").BaseHeadSplit
        body = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh())
        made: nn.Module = split(body, nn.Linear(HIDDEN, count)).double()
        return made

    def samples(self, dataset: str, i: int, **kwargs: object) -> list[tuple[Tensor, Tensor]]:
        return list(zip(*tensors(self.problem.inputs[i], self.problem.targets[i]), strict=True))

    def __call__(
        self,
        module: str,
        server: str,
        take: dict[str, str],
        *,
        loaders: list[list[tuple[str, int]]] | None = None,
        before: list[list[tuple[str, int]]] | None = None,
        cohorts: Sequence[Sequence[int]] = COHORTS,
        convert: Any = tensors,
        setup: Any = None,
        network: nn.Module | None = None,
        double: bool = False,
        **settings: object,
    ) -> Iterates:
        """The iterates of a server.

        Args:
            module: Of the server.
            server: Its class.
            take: The iterates, by our name and the name in `found`.
            loaders: For each loader that a client asks for in a round: the purposes of its epochs.
            before: The same of loaders that it asks for before the first round.
            cohorts: The clients of each round.
            convert: What a mini-batch becomes.
            setup: Called with the server.
            network: Another network than the problem's.
            double: Whether what they make themselves is in float64, too.
            settings: Arguments of the command line.
        """
        given = SETTINGS | dict(model=copy.deepcopy(network or self.network)) | settings
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64 if double else torch.float32)
        begun = False
        rounds: list[dict[str, np.ndarray]] = []
        asked: dict[int, int] = {}
        left = list(cohorts)

        def select() -> list[Any]:
            nonlocal begun
            asked.clear()
            begun = True
            if not left:
                return run.clients  # the round after the last one, which never trains
            return [run.clients[i] for i in left.pop(0)]

        def load(client: Any, batch_size: int | None = None) -> Epochs:
            nth = asked[client.id] = asked.get(client.id, -1) + 1
            now = max(0, len(cohorts) - len(left) - 1)
            purposes = ((loaders if begun else before) or [TRAIN])[nth]
            return Epochs(self.problem, now, client.id, purposes, convert)

        def record(*args: object) -> None:
            rounds.append(found(run))
            run.rs_test_acc.append(0.0)  # a score, whose maximum is printed
            if len(rounds) > ROUNDS:
                raise Done

        self.client_base.Client.load_train_data = load
        run = getattr(importlib.import_module(f"flcore.servers.{module}"), server)(
            SimpleNamespace(**given), 0
        )
        run.select_clients = select
        run.evaluate = run.evaluate_one_step = record
        run.evaluate_personalized = record if server == "pFedMe" else lambda: None
        if setup is not None:
            setup(run)
        with contextlib.suppress(Done):
            run.train()
        return {name: np.stack([row[there] for row in rounds[1:]]) for name, there in take.items()}


def found(run: Any) -> dict[str, np.ndarray]:
    """What there is when a round begins and the clients have received the server's model."""
    row = {"models": np.stack([vector(c.model.parameters()) for c in run.clients])}
    row["received"] = row["models"][0]  # where all of the model is sent
    if isinstance(run.global_model, nn.Module):
        row["global"] = vector(run.global_model.parameters())[: len(row["models"][0])]
    for name in ("model_per", "client_u"):
        if hasattr(run.clients[0], name):
            row[name] = np.stack([vector(getattr(c, name).parameters()) for c in run.clients])
    if isinstance(getattr(run.clients[0], "head", None), nn.Module):
        row["own head"] = np.stack([vector(c.head.parameters()) for c in run.clients])
    for name in ("personalized_params", "client_c"):
        if hasattr(run.clients[0], name):
            row[name] = np.stack([vector(getattr(c, name)) for c in run.clients])
    if hasattr(run.clients[0], "old_grad"):
        row["old_grad"] = np.stack([c.old_grad.numpy() for c in run.clients])
    if hasattr(run.clients[0], "alpha"):
        row["alpha"] = np.array([c.alpha for c in run.clients])
    for name in ("head", "GCE", "CoV", "cs", "global_modules"):
        if isinstance(getattr(run, name, None), nn.Module):
            row[name] = vector(getattr(run, name).parameters())
    if isinstance(getattr(run.clients[0], "global_model", None), nn.Module):
        row["messenger"] = vector(run.clients[0].global_model.parameters())
    if hasattr(run.clients[0].model, "head_g"):
        row["own heads"] = np.stack([vector(c.model.model.head.parameters()) for c in run.clients])
    if hasattr(run.clients[0], "W_h"):
        row["maps"] = np.stack([vector(c.W_h.parameters()) for c in run.clients])
    if hasattr(run.clients[0], "ps"):
        row["ps"] = np.stack([c.ps for c in run.clients])
    return row


def given_draws(run: Any) -> None:
    """Replaces what FedGen draws, labels and noise, by the same as on our side."""
    now = SimpleNamespace(round=0, made=None)
    of_server = run.train_generator

    def of_client(client: Any) -> Callable[[], None]:
        their_train = client.train

        def train() -> None:
            now.made = MadeFeatures(now.round, client.id)
            their_train()

        return train

    def train_generator() -> None:
        now.made = MadeFeatures(now.round, len(EVERYONE))
        of_server()
        now.round += 1

    def choice(known: list[int], count: int) -> np.ndarray:
        found: np.ndarray = np.sort(known)[(now.made.places(count) * len(known)).astype(int)]
        return found

    for client in run.clients:
        client.train = of_client(client)
    run.train_generator = train_generator
    vars(np.random)["choice"] = choice
    vars(torch)["rand"] = lambda shape, **given: torch.from_numpy(now.made.noise(shape[0]))


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of all methods."""
    run = Runner(problem, checkout)
    full = [[("full", 1)]]

    def whole_batches(server: Any) -> None:
        for client, size in zip(server.clients, SIZES, strict=True):
            client.batch_size = size  # of each of the two gradients of a step

    def any_batch(server: Any) -> None:
        for client in server.clients:  # a row for each sample of `batch_size`
            client.calibration = client.calibration[:1]

    def without_noise(x: Tensor, tau: float, hard: bool, dim: int) -> Tensor:
        return (x / tau).softmax(dim)

    def judged_on_training(server: Any) -> None:
        load = run.client_base.Client.load_train_data
        for client in server.clients:
            whole = Epochs(problem, 0, client.id, [("full", 1)] * 100, tensors)
            client.load_train_data = lambda client=client, whole=whole: (load(client), whole)

    def started_valves(server: Any) -> None:
        for client in server.clients:
            for number, name in enumerate(("CoV", "GCE")):
                start(getattr(client, name), number)
            client.GCE_frozen = copy.deepcopy(client.GCE)

    def started_policies(server: Any) -> None:
        vars(nn.functional)["gumbel_softmax"] = without_noise
        for client in server.clients:
            start(client.model.gate.cs, 0)
            client.context = client.model.model.head.weight.data.sum(0, keepdim=True)

    def started_generator(server: Any) -> None:
        start(server.generative_model, 0)
        given_draws(server)

    def identities(server: Any) -> None:
        for client in server.clients:
            nn.init.eye_(client.W_h.weight)

    shared, personal = {"w": "global"}, {"v": "models"}
    messenger = {"client u": "models", "m": "messenger"}
    wider = run.with_classes(CLASSES + 1)  # which nobody has; see the page
    start(wider, 0)
    steps = [("full", EPOCHS)]
    mixed: Any = {"loaders": [steps], "eta": 1.0, "rand_percent": 100, "layer_idx": 2}
    head = [("head", HEAD_EPOCHS), *TRAIN]
    return {
        "FedAvg": run("serveravg", "FedAvg", shared),
        "FedProx": run("serverprox", "FedProx", shared, mu=0.3),
        "SCAFFOLD": run("serverscaffold", "SCAFFOLD", shared | {"client c_i": "client_c"}),
        "FedDyn": run("serverdyn", "FedDyn", shared | {"client g": "old_grad"}, alpha=0.4),
        "Ditto": run(
            "serverditto",
            "Ditto",
            shared | {"v": "model_per"},
            loaders=[[("personal", EPOCHS)], TRAIN],
            mu=0.5,
            plocal_epochs=EPOCHS,
        ),
        "APFL": run("serverapfl", "APFL", shared | {"v": "model_per", "alpha": "alpha"}, alpha=0.6),
        "PerAvg": run(
            "serverperavg",
            "PerAvg",
            shared,
            loaders=full * 2,
            convert=doubled,
            setup=whole_batches,
            local_epochs=1,
        ),
        "FedRep": run("serverrep", "FedRep", personal, loaders=[head]),
        "FedPer": run("serverper", "FedPer", personal),
        "LG": run("serverlg", "LG_FedAvg", personal),
        "FedBABU": run("serverbabu", "FedBABU", {"w": "received"}),
        "FedBABU, fine-tuned": {
            # Without epochs of fine-tuning, and after it: where it begins.
            "start": run(
                "serverbabu",
                "FedBABU",
                {"v": "models"},
                loaders=[TRAIN] * 2,
                global_rounds=ROUNDS - 1,
                fine_tuning_epochs=0,
            )["v"][-1:]
        },
        "pFedMe": run(
            "serverpFedMe",
            "pFedMe",
            shared | {"v": "personalized_params"},
            lamda=2.0,
            K=3,
            p_learning_rate=0.1,
            beta=0.8,
        ),
        "pFedMe, defaults": run(
            "serverpFedMe", "pFedMe", shared, lamda=2.0, K=3, p_learning_rate=0.1, beta=0.0
        ),
        "FedAMP": run(
            "serveramp", "FedAMP", personal | {"u": "client_u"}, lamda=1.0, alphaK=1.0, sigma=5.0
        ),
        "FedGH": run(
            "servergh",
            "FedGH",
            personal,
            loaders=[TRAIN, [("train", 1)]],
            server_learning_rate=0.5,
        ),
        "MOON": run("servermoon", "MOON", shared, tau=0.5, mu=2.0),
        "FedAS": run("serveras", "FedAS", personal, loaders=[[("full", 2)], steps, *full]),
        "FedALA": run(
            "serverala", "FedALA", shared, cohorts=[EVERYONE] * ROUNDS, join_ratio=1.0, **mixed
        ),
        "FedALA, cohorts": run("serverala", "FedALA", shared, **mixed),
        "FedRoD": run("serverrod", "FedROD", shared | {"client head": "own head"}, before=full),
        "FedNTD": run("serverntd", "FedNTD", shared, tau=2.0, beta=0.7),
        "FedLC": run(
            "serverlc", "FedLC", shared, before=full, loaders=[steps], setup=any_batch, tau=0.8
        ),
        "FedDBE": run(
            "serverdbe",
            "FedDBE",
            shared,
            before=[full[0], TRAIN],
            kl_weight=3.0,
            momentum=0.6,
        ),
        "FedProto": run("serverproto", "FedProto", personal, lamda=1.5),
        "FD": run("serverfd", "FD", personal, lamda=0.6),
        "FML": run("serverfml", "FML", messenger, alpha=0.6, beta=0.3),
        "FedKD": run(
            "serverkd",
            "FedKD",
            messenger | {"client W": "maps"},
            network=wider,
            setup=identities,
            double=True,
            mentee_learning_rate=RATE,
            T_start=0.6,
            T_end=0.9,
            num_classes=CLASSES + 1,
        ),
        "GPFL": run(
            "servergpfl",
            "GPFL",
            {"φ, h": "models", "valve": "CoV", "vectors": "GCE"},
            before=full,
            setup=started_valves,
            double=True,
            lamda=0.4,
            mu=0.2,
        ),
        **{
            name: run(
                "servercp",
                "FedCP",
                {"client h": "own heads", "body": "global_modules", "head": "head", "policy": "cs"},
                cohorts=cohorts,
                join_ratio=len(cohorts[0]) / len(SIZES),
                setup=started_policies,
                double=True,
                lamda=1.5,
            )
            for name, cohorts in (("FedCP", [EVERYONE] * ROUNDS), ("FedCP, cohorts", COHORTS))
        },
        "FedFomo": run(
            "serverfomo", "FedFomo", personal, setup=judged_on_training, double=True, M=2
        ),
        "APPLE": run(
            "serverapple",
            "APPLE",
            personal | {"p": "ps"},
            cohorts=[EVERYONE] * ROUNDS,
            join_ratio=1.0,
            dr_learning_rate=0.2,
            mu=0.5,
            L=0.5,
        ),
        "FedGen": run(  # the last one, since it replaces draws
            "servergen",
            "FedGen",
            shared,
            before=full * 2,
            setup=started_generator,
            double=True,
            **FEATURES_MADE,
        ),
    }


if __name__ == "__main__":
    main(theirs)
