"""FedSA-LoRA (github.com/Pengxin-Guo/FedSA-LoRA), on FederatedScope-LLM.

Run are the clients' exchange with the server (`get_model_para` and `update` of its trainer, with
the filter by keywords) and the server's aggregator. Local training, the messages and whether
clients are one network (`core/fed_runner.py:348-353`) are written out.
"""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.lora import Network, stacked
from benchmarks.agreement.problem import (
    COHORTS,
    EVERYONE,
    SIZES,
    Iterates,
    Problem,
    absent,
    main,
    vector,
)


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of all methods."""
    absent("yacs", "yacs.config")
    sys.path.insert(0, str(checkout))
    aggregators: Any = importlib.import_module("federatedscope.core.aggregators")
    trainers: Any = importlib.import_module("federatedscope.core.trainers.torch_trainer")
    adapters: Any = importlib.import_module("federatedscope.glue.model.adapter_builder")
    found = {}
    for name, share in (("one network", True), ("own networks", False)):
        federate = SimpleNamespace(
            method="fedavg",
            share_local_model=share,
            process_num=1,
            ignore_weight=False,
            use_ss=False,
        )
        personalization = SimpleNamespace(
            local_param=["lora_B", "classifier"], share_non_trainable_para=False
        )
        settings = SimpleNamespace(
            federate=federate,
            personalization=personalization,
            llm=SimpleNamespace(deepspeed=SimpleNamespace(use=False)),
        )
        server = adapters.AdapterModel(Network())
        aggregator = aggregators.ClientsAvgAggregator(server, config=settings)
        clients = []
        for _ in EVERYONE:
            clients.append(trainers.GeneralTorchTrainer.__new__(trainers.GeneralTorchTrainer))
            network = server if share else adapters.AdapterModel(Network())
            clients[-1].ctx = SimpleNamespace(model=network)
            clients[-1]._cfg = settings
        found[name] = run(problem, server, aggregator, clients, share)
    return found


def run(
    problem: Problem, server: Any, aggregator: Any, clients: list[Any], share: bool
) -> Iterates:
    """The shared values after every round, and every client's network when it is scored."""
    rows = []
    for now, cohort in enumerate(COHORTS):
        sent, content = [], copy.deepcopy(server.state_dict())
        for i in cohort:
            clients[i].update(content, strict=share)
            clients[i].ctx.model.model.train_on(problem, now, i)
            sent.append((SIZES[i], copy.deepcopy(clients[i].get_model_para())))
        aggregator.update(aggregator.aggregate({"client_feedback": sent}))
        scored = []
        for client in clients:
            client.update(copy.deepcopy(server.state_dict()), strict=share)
            scored.append(vector(client.ctx.model.get_trainable_state_dict().values()))
        rows.append(server.model.row() | {"v": np.stack(scored)})
    return stacked(rows)


if __name__ == "__main__":
    main(theirs)
