"""fedex-lora (github.com/RaghavSinghal10/fedex-lora): the server's three aggregations.

The loop of `fed_train_glue.py` and local training are written out. The aggregations index state
dicts, which they are given; that loop hands them networks (107-111), where they stop. Means are in
float64 instead of the float32 that they fix.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.lora import RANK, SCALE, Network, stacked
from benchmarks.agreement.problem import COHORTS, Iterates, Problem, absent, import_in_float64, main


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of all methods."""
    absent("transformers", "datasets", "peft", "data_utils", "models")
    import_in_float64(checkout)
    there: Any = importlib.import_module("fed_agg")
    settings = SimpleNamespace(lora_alpha=SCALE * RANK, lora_r=RANK, rslora=False)

    def exact(network: Network, clients: list[Any]) -> None:
        there.aggregate_models_ours(network, clients, settings)

    return {
        "FedIT": run(problem, there.aggregate_models_normal),
        "FFA-LoRA": run(problem, there.aggregate_models_ffa, freeze_a=True),
        "FedEx-LoRA": run(problem, exact),
        "FedEx-LoRA, transposed": run(problem, exact, transposed=True),
    }


def run(
    problem: Problem,
    aggregate: Callable[..., object],
    freeze_a: bool = False,
    transposed: bool = False,
) -> Iterates:
    """The global network's values after every round."""
    network, client, rows = Network(transposed=transposed), Network(transposed=transposed), []
    client.body.a.requires_grad = not freeze_a
    for now, cohort in enumerate(COHORTS):
        sent = []
        for i in cohort:
            client.load_state_dict(network.state_dict())
            client.train_on(problem, now, i)
            sent.append({name: value.clone() for name, value in client.state_dict().items()})
        with contextlib.redirect_stdout(None):
            aggregate(network, sent)
        rows.append(network.row())
    return stacked(rows)


if __name__ == "__main__":
    main(theirs)
