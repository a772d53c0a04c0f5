"""FederatedLLM (github.com/ATP-1010/FederatedLLM), of FLoRA's authors: the server's aggregation.

The loop of `main.py` and local training are written out. Clients' files are read from a folder as
there; that peft merges the stacked adapter, with alpha / r as its factor, is written out, too.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.lora import RANK, SCALE, Network, drawn_factor, stacked
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


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of all methods."""
    absent("peft")
    import_in_float64(checkout)
    sys.modules["fed_utils"] = package = ModuleType("fed_utils")  # without what __init__.py imports
    package.__path__ = [str(checkout / "fed_utils")]
    there: Any = importlib.import_module("fed_utils.model_aggregation")

    def given(network: Network, weights: dict[str, Tensor], name: str) -> None:
        network.body.a.data, network.body.b.data = weights["lora_A"], weights["lora_B"]

    there.set_peft_model_state_dict = given
    ranks = [(2, 1)[i % 2] for i in EVERYONE]
    return {
        "FedIT": run(problem, there.FedAvg, [RANK] * len(EVERYONE), stacking=False),
        "FLoRA": run(problem, there.FedAvg, [RANK] * len(EVERYONE)),
        "FLoRA, ranks": run(problem, there.FedAvg, ranks, heter=True),
    }


def run(
    problem: Problem, aggregate: Any, ranks: list[int], stacking: bool = True, heter: bool = False
) -> Iterates:
    """The server's values after every round."""
    server, rows = Network(head=False), []
    for now, cohort in enumerate(COHORTS):
        with tempfile.TemporaryDirectory() as folder:
            for i in cohort:
                client = Network(head=False, rank=ranks[i])
                client.body.base_layer.load_state_dict(server.body.base_layer.state_dict())
                if stacking:
                    client.body.a.data = drawn_factor(now, i)[: ranks[i]]
                else:
                    client.load_state_dict(server.state_dict())
                client.train_on(problem, now, i)
                file = Path(folder, str(now), f"local_output_{i}", "pytorch_model.bin")
                file.parent.mkdir(parents=True)
                torch.save({"lora_A": client.body.a.data, "lora_B": client.body.b.data}, file)
            sizes = dict(enumerate(SIZES))
            with contextlib.redirect_stdout(None):
                aggregate(
                    server, cohort, folder, sizes, now, stacking, RANK, heter, ranks, False, False
                )
            if stacking:
                whole = torch.load(Path(folder, str(now), "adapter_model.bin"))
                server.body.base_layer.weight += SCALE * whole["lora_B"] @ whole["lora_A"]
        rows.append(server.row())
    return stacked(rows)


if __name__ == "__main__":
    main(theirs)
