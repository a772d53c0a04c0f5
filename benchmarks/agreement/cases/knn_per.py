"""What the code of kNN-Per's authors computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import network
from benchmarks.agreement.problem import (
    CLASSES,
    EVERYONE,
    NEIGHBOURS,
    ROUNDS,
    SHARE,
    Iterates,
    arrays,
    starts,
)
from pfl.scores.neighbours import Neighbours


@torch.no_grad()
def outputs(softmax: bool) -> Iterates:
    """The mixtures for the samples of the next client, of several models."""
    inputs, targets, start = arrays()
    model: Any = network()
    rows = []
    for values in starts(start, ROUNDS):
        nn.utils.vector_to_parameters(torch.from_numpy(values), model.parameters())
        for i in EVERYONE:
            known, new = (torch.from_numpy(inputs[k % len(EVERYONE)]) for k in (i, i + 1))
            votes = Neighbours(k=NEIGHBOURS).probabilities(
                model.body(new), model.body(known), torch.from_numpy(targets[i]), CLASSES
            )
            scores = model(new).softmax(1) if softmax else model(new)
            rows.append(SHARE * votes + (1 - SHARE) * scores)
    return {"h": torch.cat(rows).view(ROUNDS, -1, CLASSES).numpy()}


CASES = [
    Case(
        "kNN-Per, `interpolate_logits` off",
        "kNN-Per",
        "client.py:488-585, datastore.py:39-70",
        ("h",),
        partial(outputs, True),
    ),
    Case(
        "kNN-Per, `interpolate_logits` by default",
        "logits",
        "utils/args.py:209-213, client.py:503-511",
        ("h",),
        partial(outputs, True),
        "The default is the word `store_true`, which counts as true, so that the votes are mixed "
        "with the model's scores before the softmax.",
        partial(outputs, False),
    ),
]
