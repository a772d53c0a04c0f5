"""OpenFedLLM (github.com/rui-ye/OpenFedLLM): the server's aggregation, with its first states.

The loop of `main_sft.py` and local training are written out.
"""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.lora import Network, stacked
from benchmarks.agreement.problem import COHORTS, EVERYONE, SIZES, Iterates, Problem, absent, main

ALGORITHMS = ("fedavg", "fedadagrad", "fedyogi", "fedadam")
SETTINGS = dict(fedopt_beta1=0.9, fedopt_beta2=0.99, fedopt_eta=0.01, fedopt_tau=0.001)


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of all methods."""
    absent("peft", "transformers", "trl", "datasets")
    sys.path.insert(0, str(checkout))
    there: Any = importlib.import_module("federated_learning")
    return {name: run(problem, there, name) for name in ALGORITHMS}


def run(problem: Problem, there: Any, name: str) -> Iterates:
    """The global values after every round."""
    settings = SimpleNamespace(fed_alg=name, num_clients=len(EVERYONE), **SETTINGS)
    network, rows = Network(head=False), []
    adapters = {k: v for k, v in network.state_dict().items() if "lora_" in k}
    shared = copy.deepcopy(adapters)
    first, second = there.get_proxy_dict(settings, shared)
    for now, cohort in enumerate(COHORTS):
        sent: list[Any] = [None] * len(EVERYONE)
        for i in cohort:
            network.load_state_dict(shared, strict=False)
            network.train_on(problem, now, i)
            sent[i] = copy.deepcopy(adapters)  # which the network has changed in place
        shared, _ = there.global_aggregate(
            settings, shared, sent, SIZES, cohort, now, first, second, (None, None)
        )
        network.load_state_dict(shared, strict=False)
        rows.append(network.row())
    return stacked(rows)


if __name__ == "__main__":
    main(theirs)
