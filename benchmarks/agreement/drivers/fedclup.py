"""LucasXinYu/FedCLUP, the code of FedCLUP's authors: whole runs of its server and clients.

Replaced are the network, the draw of cohorts, the order of samples and the evaluation. Their files
fix float32, which is read as float64 here.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    COHORTS,
    EPOCHS,
    EVERYONE,
    RATE,
    SIZES,
    Epochs,
    Iterates,
    Problem,
    first_network,
    import_in_float64,
    main,
    tensors,
    vector,
)


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of all methods."""
    torch.set_default_dtype(torch.float64)
    import_in_float64(checkout / "src")
    sys.argv = sys.argv[:1]
    module = importlib.import_module("trainers.fedprox_server")
    vars(module)["LogisticRegression"] = lambda **kwargs: first_network(problem.start)
    vars(importlib.import_module("trainers.fedprox_client"))["tqdm"] = iter
    samples = {
        i: {"x": x.tolist(), "y": y.tolist()}
        for i, x, y in zip(EVERYONE, problem.inputs, problem.targets, strict=True)
    }

    def run(method: str, mu: float = 0.0, global_lr: float = 0.0) -> Iterates:
        args = SimpleNamespace(
            method=method,
            model_type="logistic_regression",
            input_dim=0,
            num_classes=0,
            device="cpu",
            K=len(SIZES),
            B=100,
            C=0.6,
            E=EPOCHS,
            r=1,
            lr=RATE,
            optimizer="sgd",
            weight_decay=0.0,
            step_size=1000,
            gamma=1.0,
            mu=mu,
            global_lr=global_lr,
        )
        data = {"users": list(EVERYONE), "user_data": samples}
        server: Any = module.FedProxServer(args, data, data)
        server.evaluation_data = None
        server.get_training_loss = server.get_avg_client_training_loss = lambda *args: 0.0
        rows: list[dict[str, np.ndarray]] = []
        for now, cohort in enumerate(COHORTS):
            for client in server.clients:
                purposes = [("train", EPOCHS)]
                client.train_loader = Epochs(problem, now, client.client_id, purposes, tensors)
                client.get_loss = lambda *args, **kwargs: (0.0, 0, 1)
            chosen = [server.clients[i] for i in cohort]
            vars(random)["sample"] = lambda clients, m, chosen=chosen: chosen
            with contextlib.redirect_stdout(None):
                server.train()  # one round
            v = np.stack([vector(client.model.parameters()) for client in server.clients])
            rows.append({"w": vector(server.global_model.parameters()), "v": v})
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    return {
        "FedCLUP": run("FedProx", mu=0.5, global_lr=1.2),
        "FedAvg": run("FedAvg"),
        "LocalTrain": run("LocalTrain"),
    }


if __name__ == "__main__":
    main(theirs)
