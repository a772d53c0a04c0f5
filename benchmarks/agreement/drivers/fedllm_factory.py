"""FedLLM-Factory (github.com/boyi-liu/FedLLM-Factory): whole rounds of its clients and servers.

Replaced are loading of models and data, the draw of cohorts and the local steps (its trainer's are
of AdamW). The head is frozen: only what is named lora_ is exchanged.
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

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.lora import RANK, SCALE, Network, stacked
from benchmarks.agreement.problem import (
    COHORTS,
    EVERYONE,
    SIZES,
    Iterates,
    Problem,
    absent,
    import_in_float64,
    main,
)

ALGORITHMS = ("fedit", "ffalora", "fedsalora", "rolora", "flexlora", "flora", "fedexlora", "feddpa")


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of all methods."""
    absent("peft", "transformers", "utils.data_utils", "utils.sys_utils", "utils.train_utils")
    absent("utils.eval_utils", "utils.model_utils")
    torch.set_default_dtype(torch.float64)
    import_in_float64(checkout)
    with contextlib.redirect_stdout(None):
        return {name: run(problem, importlib.import_module(f"alg.{name}")) for name in ALGORITHMS}


def run(problem: Problem, there: Any) -> Iterates:
    """The server's values after every round, and the adapter with which each client is scored."""
    settings = SimpleNamespace(sr=1.0, lora_rank=RANK, s=SCALE, alpha=0.5)
    clients = []
    for i in EVERYONE:
        clients.append(there.Client.__new__(there.Client))
        vars(clients[i]).update(
            id=i,
            args=settings,
            dataset={"train": range(SIZES[i])},
            delay=1.0,
            lora={},
            local_lora=None,
            alpha=settings.alpha,
        )
    model = Network(head=False)
    base = importlib.import_module("alg.ftbase")
    vars(base)["get_peft_model"] = lambda *args: model
    vars(base)["device_config"] = lambda *args: [1.0] * len(EVERYONE)
    server, rows = there.Server(settings, clients), []
    for i, client in enumerate(clients):
        client.trainer = SimpleNamespace(
            train=lambda network, i=i: network.train_on(problem, server.round, i)
        )
    for now, cohort in enumerate(COHORTS):
        server.round, server.sampled_clients = now, [clients[i] for i in cohort]
        server.sample = lambda: None
        server.run()
        row = model.row()
        v = np.concatenate([row["A"].ravel(), row["B"].ravel()])
        rows.append(row | {"v": np.tile(v, (len(EVERYONE), 1))})
    return stacked(rows)


if __name__ == "__main__":
    main(theirs)
