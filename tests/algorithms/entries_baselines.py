"""The baselines."""

from __future__ import annotations

from functools import partial

import torch

from pfl.algorithms import (
    SCAFFOLD,
    FedAvg,
    FedPer,
    FedProx,
    FedRep,
    LocalTrain,
)
from tests.algorithms import closed_forms as forms
from tests.algorithms.entry import Method

ENTRIES = [
    Method(
        name="FedAvg",
        kind=FedAvg,
        limit=forms.averaging,
        cost=forms.dense,
    ),
    Method(
        name="FedAvg, server Adam",  # ends where FedAvg ends
        kind=FedAvg,
        limit=forms.averaging,
        cost=forms.dense,
        arguments={
            "server_optimizer": partial(torch.optim.Adam, lr=0.5, betas=(0.3, 0.5), eps=0.5)
        },
        rounds=45,
    ),
    Method(
        name="FedProx",
        kind=FedProx,
        limit=forms.averaging,
        cost=forms.dense,
        arguments={"proximal_weight": 0.5},
        rounds=24,
    ),
    Method(
        name="SCAFFOLD",
        kind=SCAFFOLD,
        limit=forms.minimum,
        cost=forms.dense_and_control,
        settle={"lr": 0.2, "local_steps": 4},
        rounds=30,
    ),
    Method(
        name="SCAFFOLD, option I",
        kind=SCAFFOLD,
        limit=forms.minimum,
        cost=forms.dense_and_control,
        arguments={"option": "I"},
        settle={"lr": 0.2, "local_steps": 4},
        rounds=30,
    ),
    Method(
        name="LocalTrain",
        kind=LocalTrain,
        limit=forms.alone,
        cost=forms.nothing,
        private=("w",),
    ),
    Method(
        name="FedPer",
        kind=FedPer,
        limit=forms.partly_personal,
        cost=forms.body,
        private=("head",),
        trained_with_private=True,
        arguments={"personal": ["*bias"]},
    ),
    Method(
        name="FedRep",
        kind=FedRep,
        limit=forms.partly_personal,
        cost=forms.body,
        private=("head",),
        trained_with_private=True,
        arguments={"personal": ["*bias"], "head_epochs": 3},
        more_epochs=3,
    ),
]
