"""The baselines."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from models import LoRA
from pfl.algorithms import (
    APFL,
    CFL,
    IFCA,
    L2GD,
    MOON,
    MRMTL,
    SCAFFOLD,
    Ditto,
    FedAdagrad,
    FedAdam,
    FedALA,
    FedAMP,
    FedAS,
    FedAsync,
    FedAvg,
    FedBABU,
    FedBN,
    FedBuff,
    FedDBE,
    FedDPA,
    FedDyn,
    FederatedAlgorithm,
    FedExLoRA,
    FedGH,
    FedLC,
    FedNova,
    FedNTD,
    FedPAC,
    FedPer,
    FedProto,
    FedProx,
    FedRep,
    FedRoD,
    FedSALoRA,
    FedSpa,
    FedYogi,
    FlexLoRA,
    Floco,
    FLoRA,
    GlobalTrain,
    HeurFedAMP,
    LGFedAvg,
    LocalTrain,
    PerFedAvg,
    RoLoRA,
    pFedHN,
    pFedMe,
)
from tests.algorithms import closed_forms as forms
from tests.algorithms import closed_forms_baselines as more
from tests.algorithms.entry import Method


class BiasesAsNormalization(FedBN):
    """FedBN on networks without normalization layers: the biases stand for them."""

    def is_personal(self, name: str, module: nn.Module) -> bool:
        return name.endswith("bias")


class L2GDOfAnyEpochs(L2GD):
    """L2GD with the `local_epochs` that the common tests give to every method, and L2GD refuses."""

    def __init__(self, network: nn.Module, local_epochs: int = 1, **kwargs: Any) -> None:
        super().__init__(network, **kwargs)


def on_factors(kind: type[FederatedAlgorithm], pair: float | None = None, **plain: Any) -> Any:
    """A method of LoRA's factors that trains those of a network whose first layer is linear.

    Other networks, and those with a frozen first layer, are trained as they are, with `plain`
    arguments.
    """

    class OnFactors(kind):  # type: ignore[misc, valid-type]
        __signature__ = inspect.signature(kind)  # its own arguments

        def __init__(self, network: nn.Module, **kwargs: Any) -> None:
            first = network[0] if isinstance(network, nn.Sequential) else None
            if isinstance(first, nn.Linear) and first.weight.requires_grad:
                with torch.random.fork_rng():
                    torch.manual_seed(0)  # A is drawn; the body is the same in all runs
                    first.reset_parameters()
                    given = {"trainable": LoRA(rank=2, layers=["0"], pair=pair)}
                    super().__init__(network, **given, **kwargs)
            else:
                super().__init__(network, trainable=None, **plain, **kwargs)

        def check_setup(self) -> None:
            if self.factors:
                super().check_setup()

    return OnFactors


_STEP = {"server_lr": 0.5, "tau": 0.5}  # of the server
ENTRIES = [
    Method(name="FedAvg", kind=FedAvg, limit=forms.averaging, cost=forms.dense),
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
        name="LocalTrain", kind=LocalTrain, limit=forms.alone, cost=forms.nothing, private=("w",)
    ),
    Method(name="FedNova", kind=FedNova, limit=forms.averaging, cost=more.dense_and_number),
    Method(
        name="FedNova, proximal",
        kind=FedNova,
        limit=forms.averaging,
        cost=more.dense_and_number,
        arguments={"proximal_weight": 0.5},
        rounds=24,
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
    Method(
        name="FedDyn",
        kind=FedDyn,
        limit=forms.minimum,
        cost=forms.dense,
        arguments={"alpha": 1.0},
        settle={"lr": 0.3, "local_steps": 6},
        rounds=40,
    ),
    Method(
        name="Ditto",
        kind=Ditto,
        limit=more.held_to_average,
        cost=forms.dense,
        private=("v",),
        arguments={"penalty": 0.5, "personal_epochs": 2},
        rounds=24,
    ),
    Method(
        name="MRMTL",
        kind=MRMTL,
        limit=forms.held_together,
        cost=forms.dense,
        arguments={"penalty": 0.4},
        rounds=22,
    ),
    Method(
        name="FedAdagrad",
        kind=FedAdagrad,
        limit=forms.averaging,
        cost=forms.dense,
        arguments={"server_lr": 2.0, "tau": 1.0},
        rounds=90,
    ),
    Method(
        name="FedAdam",
        kind=FedAdam,
        limit=forms.averaging,
        cost=forms.dense,
        arguments=_STEP | {"betas": (0.3, 0.5)},
        rounds=45,
    ),
    Method(
        name="FedYogi",
        kind=FedYogi,
        limit=forms.averaging,
        cost=forms.dense,
        arguments={"server_lr": 1.0, "tau": 0.5, "betas": (0.3, 0.5)},
        rounds=60,
    ),
    Method(
        name="PerFedAvg, HF",
        kind=PerFedAvg,
        limit=more.meta_learned,
        cost=forms.dense,
        arguments={"alpha": 0.1},
        rounds=30,
    ),
    Method(
        name="PerFedAvg, FO",
        kind=PerFedAvg,
        limit=more.meta_learned,
        cost=forms.dense,
        arguments={"alpha": 0.1, "variant": "FO"},
        rounds=30,
    ),
    Method(
        name="APFL",
        kind=APFL,
        limit=more.mixture,
        cost=forms.dense,
        private=("v",),
        arguments={"alpha": 0.7},
        rounds=40,
    ),
    Method(
        name="APFL, adaptive",
        kind=APFL,
        limit=more.common_minimum,
        cost=forms.dense,
        private=("v",),
        arguments={"alpha": 0.7, "adaptive": True},
        rounds=40,
        problem=forms.alike,
    ),
    Method(
        name="pFedMe",
        kind=pFedMe,
        limit=more.envelopes,
        cost=forms.dense,
        arguments={"penalty": 2.0, "personal_steps": 3, "personal_lr": 0.2},
        rounds=30,
    ),
    Method(
        name="LGFedAvg",
        kind=LGFedAvg,
        limit=more.local_weights,
        cost=more.biases,
        private=("head",),
        trained_with_private=True,
        arguments={"personal": ["*weight"]},
    ),
    Method(
        name="FedBN",
        kind=BiasesAsNormalization,
        limit=forms.partly_personal,
        cost=forms.body,
        private=("head",),
        trained_with_private=True,
    ),
    Method(
        name="FedSpa",
        kind=FedSpa,
        limit=more.everything_in_the_mask,
        cost=more.half_and_the_mask,
        arguments={"pruning_rounds": 4},
        settle={"lr": 0.4, "local_steps": 6, "density": 1.0},
        timed=True,
        still=["*weight", "0.bias"],  # in no mask, or before weights that are in none
        whole=["mask"],
    ),
    Method(
        name="FedBABU",
        kind=FedBABU,
        limit=more.body_then_finetuned,
        cost=forms.body,
        arguments={"head": ["*bias"], "finetune_epochs": 2},
        still=["*bias"],
    ),
    Method(
        name="FedGH",
        kind=FedGH,
        limit=more.head_of_means,
        cost=more.head_and_pair,
        private=("body",),
        trained_with_private=True,
        arguments={"server_lr": 0.3, "server_epochs": 2},
        settle={"lr": 0.4, "local_steps": 6, "server_batch_size": None},
        rounds=30,
        timed=True,  # the order of the pairs is drawn anew in each round
    ),
    Method(
        name="FedPAC",
        kind=FedPAC,
        limit=more.mixed_biases,
        cost=more.body_head_and_statistics,
        arguments={"personal": ["*bias"], "head_epochs": 3, "head_lr": 0.5},
        counts_matter=True,  # V_i has the factor 1 / n_i, H_i has not
        more_epochs=3,
    ),
    Method(
        name="FedProto",
        kind=FedProto,
        limit=forms.alone,  # one layer has its inputs as features, which nothing moves
        cost=more.prototype,
        private=("w",),
        trained_with_private=True,
        arguments={"penalty": 0.5},
    ),
    Method(name="FedRoD", kind=FedRoD, limit=more.heads_added, cost=forms.dense, private=("head",)),
    Method(
        name="FedDBE",
        kind=FedDBE,
        # How weights, biases and memories share a move depends on all rounds, but where all clients
        # have the same minimum.
        limit=more.personal_minimum,
        cost=more.dense_and_mean,
        arguments={"penalty": 0.5, "momentum": 0.6},
        settle={"lr": 0.05, "local_steps": 12},
        rounds=36,
        problem=forms.alike,
    ),
    Method(
        name="MOON",
        kind=MOON,
        limit=forms.averaging,  # one layer has its inputs as features, which nothing moves
        cost=forms.dense,
        arguments={"contrast": 2.0},
    ),
    Method(
        name="FedLC",
        kind=FedLC,
        limit=forms.averaging,  # regression has no classes to calibrate
        cost=forms.dense,
        arguments={"calibration": 0.5},
    ),
    Method(
        name="FedNTD",
        kind=FedNTD,
        limit=forms.averaging,  # regression has no classes to distil
        cost=forms.dense,
        arguments={"distillation": 0.5},
    ),
    Method(
        name="FedALA",
        kind=FedALA,
        limit=more.own_biases,
        cost=forms.dense,
        private=("weights",),
        trained_with_private=True,
        arguments={"adaptive": ["*bias"], "share": 0.5, "window": 2, "threshold": 0.01},
        # So large that a W_i gets to 0 soon where a client's optimum is near the mean of all.
        settle={"lr": 0.4, "local_steps": 6, "weight_lr": 1e5},
        rounds=24,
        whole=["learned"],
    ),
    Method(
        name="FedAMP",
        kind=FedAMP,
        limit=more.messages,
        cost=forms.dense,
        arguments={"alpha": 1e11, "sigma": 1e12, "penalty": 5e10, "alpha_decay": 1.0},
        rounds=30,
    ),
    Method(
        name="HeurFedAMP",
        kind=HeurFedAMP,
        limit=more.messages,
        cost=forms.dense,
        arguments={
            "alpha": 1.0,
            "sigma": 1e-12,
            "penalty": 0.5,
            "alpha_decay": 1.0,
            "own_weight": 0.6,
        },
        rounds=30,
    ),
    Method(name="GlobalTrain", kind=GlobalTrain, limit=more.pooled_minimum, cost=forms.nothing),
    Method(
        name="IFCA",
        kind=IFCA,
        limit=more.averaging_in_groups,
        cost=more.models_of_clusters,
        arguments={"perturbation": 0.5},
        problem=more.groups,
    ),
    Method(
        name="CFL",
        kind=CFL,
        limit=more.averaging_in_groups,  # they differ more than their members
        cost=forms.dense,
        problem=more.groups,
        rounds=30,
        everyone=True,
    ),
    Method(
        name="L2GD",
        kind=L2GDOfAnyEpochs,
        # Only where all clients have the same minimum do the x_i settle; test_l2gd.py has others.
        limit=forms.held_together,
        cost=forms.dense,
        arguments={"penalty": 1.0, "averaging_probability": 0.5},
        settle={"lr": 0.4},
        rounds=30,
        problem=forms.alike,
        everyone=True,
        timed=True,
    ),
    Method(
        name="FedAS",
        kind=FedAS,
        limit=more.weighted_by_information,
        cost=more.body_and_number,
        private=("head",),
        trained_with_private=True,
        arguments={"personal": ["*bias"], "alignment_lr": 0.1},
        more_epochs=1,
        # A client that is far away weighs more, so that longer ways overshoot.
        settle={"lr": 0.1, "local_steps": 4},
        rounds=60,
    ),
    Method(
        name="Floco",
        kind=Floco,
        # Points are drawn, so that the heads settle where all clients have the same minimum; with a
        # radius their sum would not stay 1, which has no common minimum.
        limit=more.common_minimum,
        cost=more.heads_and_centre,
        arguments={"simplex": ["*bias"], "endpoints": 2, "projection_round": 2, "radius": 0.0},
        settle={"lr": 0.5, "local_steps": 12},
        rounds=30,
        problem=forms.alike,
        timed=True,
        draws=True,
    ),
    Method(
        name="pFedHN",
        kind=pFedHN,
        limit=forms.alone,
        cost=forms.dense,
        arguments={"server_lr": 0.04, "server_momentum": 0.6, "width": 12, "hidden_layers": 1},
        settle={"lr": 0.4, "local_steps": 6, "server_weight_decay": 0.0, "embedding": 8},
        rounds=120,
    ),
    *(
        Method(name=kind.__name__, kind=on_factors(kind), limit=forms.averaging, **about)
        for kind, about in (
            (FedExLoRA, {"cost": forms.dense}),
            (FLoRA, {"cost": forms.dense, "timed": True, "draws": True}),
            (FlexLoRA, {"cost": forms.dense}),
            (RoLoRA, {"cost": forms.dense, "timed": True}),
        )
    ),
    Method(
        name="FedSALoRA",
        kind=on_factors(FedSALoRA, personal=["*bias"]),
        limit=forms.partly_personal,
        cost=forms.body,
        private=("head",),
        trained_with_private=True,
    ),
    Method(
        name="FedDPA",
        kind=on_factors(FedDPA, pair=0.4, personal=["*bias"]),
        limit=forms.partly_personal,
        cost=forms.body,
        private=("head",),
        arguments={"weighting": "samples", "personal_epochs": 3},
        more_epochs=3,
    ),
    Method(
        name="FedBuff",
        kind=FedBuff,
        limit=forms.averaging,
        cost=forms.dense,
        arguments={"weighting": "samples", "buffer_size": 2},
    ),
    Method(
        name="FedAsync",
        kind=FedAsync,
        limit=forms.averaging,
        cost=forms.dense,
        arguments={"weighting": "samples", "mixing": 0.9, "proximal_weight": 0.5},
        rounds=30,
    ),
]
