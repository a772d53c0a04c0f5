"""huangtiansheng/fedslr, the code of FedSLR's authors: whole runs of its training functions.

Their files fix float32, which is read as float64 here. Batches are full, since the functions make
shuffled loaders themselves. Cohorts are given through the draw of random numbers, and models are
recorded where they are evaluated.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    CLASSES,
    EPOCHS,
    EVERYONE,
    FEATURES,
    HIDDEN,
    RATE,
    ROUNDS,
    SIZES,
    Iterates,
    Problem,
    drawn_cohorts,
    import_in_float64,
    main,
)


class Network(nn.Module):
    """The head has a name by which the methods with a personal part tell it from the body."""

    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, HIDDEN)
        self.linear = nn.Linear(HIDDEN, CLASSES)
        nn.utils.vector_to_parameters(torch.tensor(start), self.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(self.body(x)))


def effective(model: Any) -> np.ndarray:
    """The parameters of a model; of the two components as the model's status says."""
    values = []
    for layer in (model.body, model.linear):
        if hasattr(layer, "sparseFunction"):
            values += [part.detach().reshape(-1) for part in layer.sparseFunction()]
        else:
            values += [part.detach().reshape(-1) for part in layer.parameters()]
    return torch.cat(values).numpy().copy()


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of all methods."""
    torch.set_default_dtype(torch.float64)
    import_in_float64(checkout)
    methods = importlib.import_module("utils_methods")
    models = importlib.import_module("utils_models")
    seen: list[np.ndarray] = []

    def evaluate(x: Any, y: Any, model: nn.Module, *args: object) -> tuple[float, float]:
        seen.append(effective(model))
        return 0.0, 0.0

    patched: dict[str, Any] = dict(get_acc_loss=evaluate, record_npy=lambda *args: None)
    vars(methods).update(patched)
    vars(torch)["save"] = lambda *args: None
    targets = [y.reshape(-1, 1) for y in problem.targets]
    data = SimpleNamespace(
        dataset="synt",
        n_client=len(SIZES),
        client_x=problem.inputs,
        client_y=targets,
        client_test_x=problem.inputs,
        client_test_y=targets,
    )

    def plain() -> nn.Module:
        return Network(problem.start)

    def masked() -> nn.Module:
        model: nn.Module = models.construct_mask_model(Network(problem.start), None)
        return model

    def masked_from_zero() -> nn.Module:
        model = masked()
        for name, parameter in model.named_parameters():
            if ".p" in name:
                parameter.data.zero_()
        return model

    def run(name: str, kinds: str, make: Any = plain, **settings: Any) -> Iterates:
        """The iterates of a function, which evaluates these kinds of models of each client."""
        seen.clear()
        vars(np.random)["uniform"] = drawn_cohorts()
        shared = dict(
            data_obj=data,
            act_prob=0.5,
            learning_rate=RATE,
            batch_size=max(SIZES),
            epoch=EPOCHS,
            com_amount=ROUNDS,
            test_per=1,
            weight_decay=0.0,
            model_func=make,
            init_model=make(),
            sch_step=1,
            sch_gamma=1.0,
            device="cpu",
        )
        with contextlib.redirect_stdout(None):
            getattr(methods, f"train_{name}")(**shared | settings)
        rows = np.stack(seen).reshape(ROUNDS, len(EVERYONE), len(kinds), -1)
        found = {kind: rows[:, :, k] for k, kind in enumerate(kinds)}
        return {kind: row[:, 0] if kind == "w" else row for kind, row in found.items()}

    slr = dict(
        alpha_coef=0.4, sparse_threshold=0.01, rank_threshold=0.02, weight_decay=1e-3, mode="LR+S"
    )
    return {
        "FedAvg": run("FedAvg", "wv", finetune_proximal=0.5),
        "FedRep": run("FedRep", "v"),
        "LGFedAvg": run("LGFedAvg", "v"),
        "SCAFFOLD": run("SCAFFOLD", "wv", n_minibatch=EPOCHS),
        "APFL": run("apfl", "v", alpha_apfl=0.6),
        "FedSLR": run("fedSLR", "wv", masked, **slr),
        "FedSLR, p from zero": run("fedSLR", "wv", masked_from_zero, **slr),
    }


if __name__ == "__main__":
    main(theirs)
