"""The code of FedDF's authors: the server's mean and its distilling, with given clients' models.

Local steps are plain SGD of the driver. Replaced are the loader of the public inputs, and the
validation, which calls the newest model the best. In float64 where they fix float32.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    COHORTS,
    DISTILLED,
    EPOCHS,
    RATE,
    Iterates,
    Problem,
    absent,
    first_network,
    import_in_float64,
    main,
    public_inputs,
    tensors,
    vector,
)


class Network(nn.Module):
    """The problem's network, with what their solver reads besides."""

    activations = ()

    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        self.layers = first_network(start)

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def trained(network: nn.Module, problem: Problem, round_index: int, client: int) -> nn.Module:
    """A copy of a network after a client's local steps."""
    network = copy.deepcopy(network).train()
    for parameter in network.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    for epoch in range(EPOCHS):
        for batch in problem.batches("train", round_index, client, epoch):
            x, y = tensors(*batch)
            optimizer.zero_grad()
            cross_entropy(network(x), y).backward()
            optimizer.step()
    return network


def run(problem: Problem, **aggregate: object) -> Iterates:
    """The server's model after each round."""
    mean = importlib.import_module("pcode.aggregation.fedavg")
    distilling = importlib.import_module("pcode.aggregation.noise_knowledge_transfer")
    buffer: Any = importlib.import_module("pcode.utils.tensor_buffer").TensorBuffer
    scores = itertools.count()
    vars(distilling.master_utils)["validate"] = lambda **given: {"top1": next(scores)}
    model: nn.Module = Network(problem.start)
    inputs = torch.from_numpy(public_inputs())
    rows = []
    for now, cohort in enumerate(COHORTS):
        archs = dict.fromkeys(cohort, "one")
        settings = dict(
            total_n_server_pseudo_batches=DISTILLED["server_steps"],
            eval_batches_freq=DISTILLED["server_steps"],
            student_learning_rate=DISTILLED["server_lr"],
            **aggregate,
        )
        conf = SimpleNamespace(
            fl_aggregate=settings,
            graph=SimpleNamespace(on_cuda=False),
            logger=MagicMock(),
            clientid2arch=archs,
        )
        sent = {}
        for i in cohort:
            values = trained(model, problem, now, i).state_dict().values()
            sent[i] = buffer(list(values))
        empty = {"one": copy.deepcopy(model)}
        fused = mean._fedavg(archs, len(cohort), sent, copy.deepcopy(empty))
        picks = problem.orders["public", now, 0][0][0]
        found = distilling.aggregate(
            conf,
            {"one": fused},
            empty,
            criterion=None,
            metrics=None,
            flatten_local_models=sent,
            fa_val_perf=None,
            distillation_sampler=None,
            distillation_data_loader=[(inputs[picks], None)],
            val_data_loader=[None],
            test_data_loader=None,
        )
        model = found["one"]
        rows.append(vector(model.parameters()))
    return {"w": np.stack(rows)}


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The server's models, with the scheme of the authors' scripts and with that of their code."""
    torch.set_default_dtype(torch.float64)
    absent("lmdb", "cv2", "six", "six.moves", "tensorpack", "tensorpack.dataflow")
    absent("tensorpack.utils", "tensorpack.utils.compatible_serialize")
    vars(torch)["FloatTensor"] = torch.DoubleTensor
    import_in_float64(checkout / "codes" / "FedDF-code")
    return {
        "FedDF": run(problem, update_student_scheme="avg_logits"),
        "FedDF, losses": run(problem),
    }


if __name__ == "__main__":
    main(theirs)
