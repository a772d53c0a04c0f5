"""The cells methods x tasks: what each method does with targets of each kind.

`python -m tests.algorithms.task_cells` prints the table of docs/methods.md.
"""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pfl.algorithms
from datamodules import ConfigError, FederatedDataModule, SharedTest
from models import HalfSquaredError, LoRA
from pfl.algorithms import FederatedAlgorithm
from pfl.method.exported import client_network, global_network
from tests.algorithms.entries_baselines import WITH_PUBLIC
from tests.problems import owned, run

OWNERS = np.repeat([0, 1, 2], [7, 4, 5])
VOID = 255
FACTORS = ("FedDPA", "FedExLoRA", "FedSALoRA", "FlexLoRA", "FLoRA", "RoLoRA")
NO_METHOD = ("FederatedAlgorithm",)
METHODS = [name for name in pfl.algorithms.__all__ if name not in NO_METHOD]
# Rounds, penalties and a few steps of the server in which a method can be told from FedAvg on
# sixteen samples.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "CFL": {"mean_norm": 1e9, "largest_norm": 0.0},
    "Floco": {"projection_round": 1},
    "FedPD": {"proximal_step": 0.5},
    "FedSpa": {"density": 0.7},
    "FedFomo": {"judged_on": "training"},
    "FedDF": {"server_steps": 4},
    "FedGen": {"server_steps": 4},
    "FedTGP": {"server_epochs": 4},
    "pFedMe": {"lr": 0.05},
}


class Body(nn.Module):
    """Features with a layer of normalization, and a head that is called last."""

    def __init__(self, first: nn.Module, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.norm = norm
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.first(x))))


def flat(outputs: int) -> nn.Module:
    """From R^3, through 4 features."""
    return Body(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, outputs))


class Tokens(nn.Module):
    """Scores of five tokens for the next one, [B, 5, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.norm(self.first(tokens))))).transpose(1, 2)


def pixels() -> nn.Module:
    """Scores of three classes for each pixel of a gray image, [B, 3, 2, 2]."""
    return Body(nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 1))


@dataclass(frozen=True)
class Task:
    """A small problem.

    Attributes:
        network: Makes the network.
        targets: Makes the targets from normal numbers [N, 4].
        inputs: Makes the inputs from normal numbers [N, 4].
        loss: The loss; None: the default.
        trainable: What of the network is trained, but for the adapter that a method needs.
    """

    network: Callable[[], nn.Module]
    targets: Callable[[Tensor], Tensor]
    inputs: Callable[[Tensor], Tensor] = lambda x: x[:, :3]
    loss: nn.Module | None = None
    trainable: str | None = None


def three_classes(y: Tensor) -> Tensor:
    """Classes 0, 1 and 2, [N, 4]."""
    return (y > -0.5).long() + (y > 0.5).long()


def with_void(y: Tensor) -> Tensor:
    """Classes of pixels [N, 2, 2], of which a few have none."""
    return three_classes(y).masked_fill(y > 1.5, VOID).reshape(-1, 2, 2)


LABELS = nn.BCEWithLogitsLoss()
TASKS = {
    "classes": Task(lambda: flat(3), lambda y: three_classes(y)[:, 0]),
    "one output": Task(lambda: flat(1), lambda y: (y[:, 0] > 0).float(), loss=LABELS),
    "several labels": Task(lambda: flat(2), lambda y: (y[:, :2] > 0).float(), loss=LABELS),
    "regression": Task(lambda: flat(2), lambda y: y[:, :2], loss=HalfSquaredError()),
    "forecast": Task(lambda: flat(1), lambda y: y[:, 0], loss=HalfSquaredError()),
    "pixels": Task(
        pixels,
        with_void,
        lambda x: x.reshape(-1, 1, 2, 2),
        nn.CrossEntropyLoss(ignore_index=VOID),
    ),
    "next token": Task(
        Tokens,
        lambda y: torch.cat([three_classes(y)[:, 1:], three_classes(y)[:, :1]], 1),
        lambda y: three_classes(y),
    ),
    "classes, a frozen body": Task(
        lambda: flat(3), lambda y: three_classes(y)[:, 0], trainable="head"
    ),
}


def world(task: Task) -> FederatedDataModule:
    """Three clients of unlike sizes, and three test samples for all of them."""
    drawn = torch.from_numpy(np.random.default_rng(3).normal(size=(2, 19, 4))).float()
    inputs = task.inputs(drawn[0])
    targets = task.targets(drawn[1])
    protocol = SharedTest(validation=0.0)
    return owned(OWNERS, inputs[:16], targets[:16], inputs[16:], targets[16:], protocol=protocol)


def adapter_of(name: str) -> LoRA | None:
    """Returns the adapter that a method of LoRA's factors needs; None for other methods."""
    if name == "FedDPA":
        return LoRA(rank=2, pair=0.5)
    if name in FACTORS:
        return LoRA(rank=2)
    return None


def trained(name: str, task: Task, root: Path, adapter: LoRA | None = None) -> FederatedAlgorithm:
    """Returns a method after two rounds of one local epoch, perhaps with an adapter.

    Raises:
        ConfigError: The method refuses the task.
    """
    torch.manual_seed(1)
    arguments: dict[str, Any] = {"lr": 0.2, "batch_size": 2}  # 4, 2 and 3 local steps
    if adapter is not None:
        arguments["trainable"] = adapter
    elif task.trainable is not None:
        arguments["trainable"] = task.trainable
    if name in WITH_PUBLIC:
        arguments["public"] = world(task)
    arguments |= ARGUMENTS.get(name, {})
    kind = getattr(pfl.algorithms, name)
    method = kind(task.network(), loss=copy.deepcopy(task.loss), **arguments)
    return run(method, world(task), 2, root=root, precision="32-true", evaluate=())


def models_of(method: FederatedAlgorithm) -> list[Tensor]:
    """Returns the models [M, P] that a method has trained: the global one, and the personalized."""
    (clients,) = method.iter_clients()
    found = []
    if method.has_global:
        found.append(method.global_model.expand(len(clients), -1))
    if method.has_personalized:
        found.append(method.personalized(clients))
    return found


def outputs_of(method: FederatedAlgorithm, task: Task) -> list[Tensor]:
    """Returns what the models that a method has trained give for the test samples."""
    networks = []
    if method.has_global:
        networks.append(global_network(method))
    if method.has_personalized:
        networks += [client_network(method, client) for client in range(3)]
    inputs = world(task).samples.gather(torch.arange(16, 19))[0]
    with torch.no_grad():
        return [network(inputs) for network in networks]


def cell(name: str, task: Task, root: Path, averaged: Tensor | None = None) -> str:
    """Returns the line in which a method refuses a task, "FedAvg" if it is FedAvg, "" if it runs.

    A method of LoRA's factors is compared with FedAvg of the same adapters, by its outputs.

    Args:
        name: The method.
        task: The task.
        root: Where the run is written.
        averaged: FedAvg's model after the same run.
    """
    adapter = None
    if task.trainable is None:
        adapter = adapter_of(name)
    try:
        method = trained(name, task, root, adapter)
    except ConfigError as error:
        return str(error)
    if adapter is not None:
        (expected, *_) = outputs_of(trained("FedAvg", task, root, adapter), task)
        same = [torch.allclose(one, expected, atol=1e-6) for one in outputs_of(method, task)]
        if all(same):
            return "FedAvg"
        return ""
    models = models_of(method)
    if averaged is None or models[0].shape[1:] != averaged.shape:
        return ""
    if all(torch.allclose(one, averaged, rtol=0, atol=1e-7) for one in models):
        return "FedAvg"
    return ""


def column(task: Task, root: Path) -> dict[str, str]:
    """Returns the cells of a task by method."""
    averaged = models_of(trained("FedAvg", task, root))[0][0]
    cells = {name: cell(name, task, root, averaged) for name in METHODS if name != "FedAvg"}
    return {"FedAvg": ""} | cells


def reason(line: str) -> str:
    """Returns a refusal in the words of the table, without what the network is called."""
    if "one class per sample" in line or "several labels per sample" in line:
        return "one class for a sample is needed"
    if "needs a linear layer" in line:
        return "the head must be a linear layer"
    if "call the layer last" in line:
        return "the head must be the last thing that is called"
    if "so that the penalty of" in line:
        return "its penalty is on features of the body"
    if "some of the parameters, and not all" in line or "chooses none of what is trained" in line:
        return "it has parts, of which one would not be trained"
    if "factors A and B" in line or "two adapters" in line or "lora_B" in line:
        return "LoRA's factors are needed"
    if "matches none of the layers" in line:
        return "LoRA needs linear layers"
    return line


def refusals(cells: dict[str, str]) -> str:
    """Returns the second cell of a row of the table: the methods that refuse a task, by reason."""
    named: dict[str, list[str]] = {}
    for name, line in cells.items():
        if line:
            named.setdefault(reason(line), []).append(name)
    parts = [f"{', '.join(f'`{name}`' for name in names)}: {why}" for why, names in named.items()]
    return "; ".join(parts) or "none"


def main() -> None:
    keys: dict[str, list[str]] = {}  # the tasks that the same methods refuse for the same reasons
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        for key, task in TASKS.items():
            keys.setdefault(refusals(column(task, Path(folder))), []).append(key)
    for refused, tasks in keys.items():
        print(f"| {'; '.join(tasks)} | {refused} |")


if __name__ == "__main__":
    main()
