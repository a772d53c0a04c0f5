"""The baselines."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from datamodules import SplitOwn, TensorDataModule
from models import Family, LoRA
from pfl.algorithms import (
    GPFL,
    L2GD,
    FedBN,
    FedCP,
    FedDF,
    FedDPA,
    FederatedAlgorithm,
    FedExLoRA,
    FedMD,
    FedMRL,
    FedSALoRA,
    FlexLoRA,
    FLoRA,
    RoLoRA,
)
from pfl.method.messenger import Joined
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


WITH_PUBLIC = ("FedMD", "FedDF")


def with_public(kind: type[FederatedAlgorithm], count: int = 5) -> Any:
    """A method with public samples: normal numbers, as many as the network's first layer takes."""

    class WithPublic(kind):  # type: ignore[misc, valid-type]
        __signature__ = inspect.signature(kind)  # its own arguments

        def __init__(self, network: nn.Module, **kwargs: Any) -> None:
            first = network
            if isinstance(network, Family):
                first = network.networks[network.names[0]]
            weights = [getattr(m, "W", getattr(m, "weight", None)) for m in first.modules()]
            matrix = next(w for w in weights if w is not None and w.dim() == 2)
            kwargs.setdefault("public", normals(count, (matrix.shape[1],)))
            super().__init__(network, **kwargs)

    return WithPublic


def normals(count: int, shape: tuple[int, ...]) -> TensorDataModule:
    """Inputs of a shape, of normal numbers, and targets that nobody reads."""
    inputs = torch.from_numpy(np.random.default_rng(11).normal(size=(count, *shape)))
    none = SplitOwn(test=0.0, validation=0.0)
    return TensorDataModule(inputs, torch.zeros(count), num_clients=1, protocol=none)


class AlikeFedMRL(FedMRL):
    """Projectors are drawn alike in all runs, whatever their seeds."""

    __signature__ = inspect.signature(FedMRL)

    @staticmethod
    def joint(own: nn.Module, messenger: nn.Module) -> Joined:
        with torch.random.fork_rng():
            torch.manual_seed(4)
            return FedMRL.joint(own, messenger)


def drawn_alike(kind: type[FederatedAlgorithm]) -> Any:
    """A method that draws the layers that it adds to a network: the same ones in all runs."""

    class Drawn(kind.wrapper):  # type: ignore[name-defined]
        def __init__(self, network: nn.Module) -> None:
            with torch.random.fork_rng():
                torch.manual_seed(4)
                super().__init__(network)

    class Alike(kind):  # type: ignore[misc, valid-type]
        __signature__ = inspect.signature(kind)
        wrapper = Drawn

    return Alike


# A part that stays with the client, trained together with what it sends.
HEAD: dict[str, Any] = {"private": ("head",), "trained_with_private": True}
_STEP = {"server_lr": 0.5, "tau": 0.5}  # of the server
ENTRIES = [
    Method("FedAvg", forms.averaging, forms.dense),
    Method(
        "FedAvg, server Adam",  # ends where FedAvg ends
        forms.averaging,
        forms.dense,
        {"server_optimizer": partial(torch.optim.Adam, lr=0.5, betas=(0.3, 0.5), eps=0.5)},
        rounds=45,
    ),
    Method("FedProx", forms.averaging, forms.dense, {"proximal_weight": 0.5}, rounds=24),
    Method(
        "SCAFFOLD",
        forms.minimum,
        forms.dense_and_control,
        settle={"lr": 0.2, "local_steps": 4},
        rounds=30,
    ),
    Method(
        "SCAFFOLD, option I",
        forms.minimum,
        forms.dense_and_control,
        {"option": "I"},
        settle={"lr": 0.2, "local_steps": 4},
        rounds=30,
    ),
    Method("LocalTrain", forms.alone, forms.nothing, private=("w",)),
    Method("FedNova", forms.averaging, more.dense_and_number),
    Method(
        "FedNova, proximal",
        forms.averaging,
        more.dense_and_number,
        {"proximal_weight": 0.5},
        rounds=24,
    ),
    Method("FedPer", forms.partly_personal, forms.body, {"personal": ["*bias"]}, **HEAD),
    Method(
        "FedRep",
        forms.partly_personal,
        forms.body,
        {"personal": ["*bias"], "head_epochs": 3},
        **HEAD,
        more_epochs=3,
    ),
    Method(
        "FedDyn",
        forms.minimum,
        forms.dense,
        {"alpha": 1.0},
        settle={"lr": 0.3, "local_steps": 6},
        rounds=40,
    ),
    Method(
        "Ditto",
        more.held_to_average,
        forms.dense,
        {"penalty": 0.5, "personal_epochs": 2},
        private=("v",),
        rounds=24,
    ),
    Method("MRMTL", forms.held_together, forms.dense, {"penalty": 0.4}, rounds=22),
    Method("FedAdagrad", forms.averaging, forms.dense, {"server_lr": 2.0, "tau": 1.0}, rounds=90),
    Method("FedAdam", forms.averaging, forms.dense, _STEP | {"betas": (0.3, 0.5)}, rounds=45),
    Method(
        "FedYogi",
        forms.averaging,
        forms.dense,
        {"server_lr": 1.0, "tau": 0.5, "betas": (0.3, 0.5)},
        rounds=60,
    ),
    Method("PerFedAvg, HF", more.meta_learned, forms.dense, {"alpha": 0.1}, rounds=30),
    Method(
        "PerFedAvg, FO", more.meta_learned, forms.dense, {"alpha": 0.1, "variant": "FO"}, rounds=30
    ),
    Method("APFL", more.mixture, forms.dense, {"alpha": 0.7}, private=("v",), rounds=40),
    Method(
        "APFL, adaptive",
        more.common_minimum,
        forms.dense,
        {"alpha": 0.7, "adaptive": True},
        private=("v",),
        rounds=40,
        problem=forms.alike,
    ),
    Method(
        "pFedMe",
        more.envelopes,
        forms.dense,
        {"penalty": 2.0, "personal_steps": 3, "personal_lr": 0.2},
        rounds=30,
    ),
    Method("LGFedAvg", more.local_weights, more.biases, {"personal": ["*weight"]}, **HEAD),
    Method("FedBN", forms.partly_personal, forms.body, **HEAD, kind=BiasesAsNormalization),
    Method(
        "FedSpa",
        more.everything_in_the_mask,
        more.half_and_the_mask,
        {"pruning_rounds": 4},
        settle={"lr": 0.4, "local_steps": 6, "density": 1.0},
        timed=True,
        still=["*weight", "0.bias"],  # in no mask, or before weights that are in none
        whole=["mask"],
    ),
    Method(
        "FedBABU",
        more.body_then_finetuned,
        forms.body,
        {"head": ["*bias"], "finetune_epochs": 2},
        still=["*bias"],
    ),
    Method(
        "FedGH",
        more.head_of_means,
        more.head_and_pair,
        {"server_lr": 0.3, "server_epochs": 2},
        private=("body",),
        trained_with_private=True,
        settle={"lr": 0.4, "local_steps": 6, "server_batch_size": None},
        rounds=30,
        timed=True,  # the order of the pairs is drawn anew in each round
    ),
    Method(
        "FedPAC",
        more.mixed_biases,
        more.body_head_and_statistics,
        {"personal": ["*bias"], "head_epochs": 3, "head_lr": 0.5},
        problem=partial(forms.with_classes, opposite=True),
        classes=True,
        counts_matter="later",  # V_i has the factor 1 / n_i, H_i has not
        more_epochs=3,
    ),
    Method(
        "FedProto",
        forms.alone,  # one layer has its inputs as features, which nothing moves
        more.prototypes,
        {"penalty": 0.5},
        problem=forms.with_classes,
        classes=True,
        private=("w",),
        trained_with_private=True,
    ),
    Method(
        "FedDistill",
        forms.alone,  # without the penalty, as the softmax of linear scores has no closed form
        more.class_probabilities,
        problem=forms.with_classes,
        classes=True,
        private=("w",),
        trained_with_private=True,
        settle={"lr": 0.4, "local_steps": 6, "penalty": 0.0},
    ),
    Method(
        "FedTGP",
        forms.alone,  # one layer has its inputs as features, which nothing moves
        more.trained_prototypes,
        {"penalty": 0.5, "server_epochs": 2},
        problem=forms.with_classes,
        classes=True,
        private=("w",),
        trained_with_private=True,
        timed=True,  # the order of the pairs is drawn anew in each round
    ),
    Method(
        "FedMD",
        forms.alone,  # without digesting; what pulls all scores together has no closed form
        more.scores_of_public_samples,
        private=("w",),
        trained_with_private=True,
        settle={"lr": 0.4, "local_steps": 6, "digest_epochs": 0},
        timed=True,  # the public samples of a round are drawn
        kind=with_public(FedMD),
    ),
    Method(
        "FedDF",
        forms.averaging,  # without steps of the server, as the softmax has no closed form
        forms.dense,
        {"server_steps": 4},
        problem=forms.with_classes,
        classes=True,
        settle={"lr": 0.4, "local_steps": 6, "server_steps": 0},
        timed=True,  # the public samples of a round are drawn
        kind=with_public(FedDF),
    ),
    Method(
        "FedGen",
        forms.averaging,  # without made features
        more.generator_and_label_shares,
        {"noise": 2, "hidden": 3, "server_steps": 4},
        problem=forms.with_classes,
        classes=True,
        settle={"lr": 0.4, "local_steps": 6, "regularization": 0.0},
        timed=True,  # what is drawn is another in each round
        draws=True,
        whole=["label_shares"],  # of a client with one sample
    ),
    Method(
        "FedGen, head",
        more.averaging_of_heads,  # one layer is the head
        more.generator_and_label_shares,
        {"shared": "head", "noise": 2, "hidden": 3, "server_steps": 4},
        private=("body",),
        trained_with_private=True,
        problem=forms.with_classes,
        classes=True,
        settle={"lr": 0.4, "local_steps": 6, "regularization": 0.0},
        timed=True,
        draws=True,
        whole=["label_shares"],
    ),
    Method(
        "FedKD",
        more.alone_beside_averaging,
        more.messenger_of_low_rank,
        problem=forms.with_classes,
        classes=True,
        private=("head",),
        trained_with_private=True,
        settle={"lr": 0.4, "local_steps": 6, "distillation": 0.0}
        | {"first_energy": 1.0, "last_energy": 1.0},
        timed=True,  # what is sent has the more values the later the round
        whole=["network.projection.weight"],  # of the server, which stays the identity
    ),
    Method(
        "FedMRL",
        None,
        more.messenger_beside,
        classes=True,
        private=("head",),
        trained_with_private=True,
        kind=AlikeFedMRL,
        settle={"lr": 0.02, "local_steps": 2},  # the samples of the quadratics are large
    ),
    Method(
        "FML",
        # Without distillation, as the softmax of linear scores has no closed form.
        more.alone_beside_averaging,
        more.messenger,
        problem=forms.with_classes,
        classes=True,
        private=("head",),
        trained_with_private=True,
        settle={"lr": 0.4, "local_steps": 6, "alpha": 1.0, "beta": 1.0},
    ),
    Method(
        "FedRoD",
        more.heads_added,
        forms.dense,
        private=("head",),
        problem=forms.with_classes,
        classes=True,
    ),
    Method(
        "FedDBE",
        # How weights, biases and memories share a move depends on all rounds, but where all clients
        # have the same minimum.
        more.personal_minimum,
        more.dense_and_mean,
        {"penalty": 0.5, "momentum": 0.6},
        settle={"lr": 0.05, "local_steps": 12},
        rounds=36,
        problem=forms.alike,
    ),
    Method(
        "MOON",
        forms.averaging,  # one layer has its inputs as features, which nothing moves
        forms.dense,
        {"contrast": 2.0},
    ),
    Method(
        "FedLC",
        more.calibrated,
        forms.dense,
        {"calibration": 0.5},
        problem=forms.with_classes,
        classes=True,
        counts_matter="always",  # it acts on the numbers of samples themselves
    ),
    Method(
        "FedNTD",
        forms.averaging,  # of two classes one is not true, and q has one value
        forms.dense,
        {"distillation": 0.5},
        problem=forms.with_classes,
        classes=True,
    ),
    Method(
        "FedALA",
        more.own_biases,
        forms.dense,
        {"adaptive": ["*bias"], "share": 0.5, "window": 2, "threshold": 0.01},
        private=("weights",),
        trained_with_private=True,
        # So large that a W_i gets to 0 soon where a client's optimum is near the mean of all.
        settle={"lr": 0.4, "local_steps": 6, "weight_lr": 1e5},
        rounds=24,
        whole=["learned"],
    ),
    Method(
        "FedAMP",
        more.messages,
        forms.dense,
        {"alpha": 1e11, "sigma": 1e12, "penalty": 5e10, "alpha_decay": 1.0},
        rounds=30,
    ),
    Method(
        "HeurFedAMP",
        more.messages,
        forms.dense,
        {"alpha": 1.0, "sigma": 1e-12, "penalty": 0.5, "alpha_decay": 1.0, "own_weight": 0.6},
        rounds=30,
    ),
    Method(
        "FedFomo",
        forms.alone,  # near its optimum a client gains nothing from others
        more.models_of_others,
        {"models": 2, "judged_on": "training"},
        timed=True,  # the number of the round decides who is asked
    ),
    Method(
        "APPLE",
        more.personal_minimum,  # elsewhere it depends on all rounds how a w_i gets to its optimum
        more.core_models,
        {"relationship_lr": 0.01, "penalized_rounds": 3},
        settle={"lr": 0.6, "local_steps": 4},
        rounds=100,
        problem=forms.alike,
        timed=True,  # the penalty falls from round to round
    ),
    Method(
        "GPFL",
        None,
        more.shared_part,
        {"penalty": 0.5},
        **HEAD,
        classes=True,
        kind=drawn_alike(GPFL),
        settle={"lr": 0.02, "local_steps": 2},  # the samples of the quadratics are large
        still=["conditions.*", "valve.*", "head.own.weight"],  # units that ReLU has switched off
    ),
    Method(
        "FedCP",
        None,
        more.shared_part,
        classes=True,
        kind=drawn_alike(FedCP),
        still=["policy.*"],
    ),
    Method("GlobalTrain", more.pooled_minimum, forms.nothing),
    Method("HeteroFL", more.plain_averaging, forms.dense),  # with one network for all
    Method("FedRolex", more.plain_averaging, forms.dense),
    Method(
        "IFCA",
        more.averaging_in_groups,
        more.models_of_clusters,
        {"perturbation": 0.5},
        problem=more.groups,
    ),
    Method(
        "CFL",
        more.averaging_in_groups,  # they differ more than their members
        forms.dense,
        problem=more.groups,
        rounds=30,
        everyone=True,
    ),
    Method(
        "L2GD",
        # Only where all clients have the same minimum do the x_i settle; test_l2gd.py has others.
        forms.held_together,
        forms.dense,
        {"penalty": 1.0, "averaging_probability": 0.5},
        settle={"lr": 0.4},
        rounds=30,
        problem=forms.alike,
        everyone=True,
        timed=True,
        kind=L2GDOfAnyEpochs,
    ),
    Method(
        "FedAS",
        more.weighted_by_information,
        more.body_and_number,
        {"personal": ["*bias"], "alignment_lr": 0.1},
        **HEAD,
        problem=forms.with_classes,
        classes=True,
        more_epochs=1,
        # A client that is far away weighs more, so that longer ways overshoot.
        settle={"lr": 0.1, "local_steps": 4},
        rounds=60,
    ),
    Method(
        "Floco",
        # Points are drawn, so that the heads settle where all clients have the same minimum; with a
        # radius their sum would not stay 1, which has no common minimum.
        more.common_minimum,
        more.heads_and_centre,
        {"simplex": ["*bias"], "endpoints": 2, "projection_round": 2, "radius": 0.0},
        settle={"lr": 0.5, "local_steps": 12},
        rounds=30,
        problem=forms.alike,
        timed=True,
        draws=True,
    ),
    Method(
        "pFedHN",
        forms.alone,
        forms.dense,
        {"server_lr": 0.04, "server_momentum": 0.6, "width": 12, "hidden_layers": 1},
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
        "FedSALoRA",
        forms.partly_personal,
        forms.body,
        **HEAD,
        kind=on_factors(FedSALoRA, personal=["*bias"]),
    ),
    Method(
        "FedDPA",
        forms.partly_personal,
        forms.body,
        {"weighting": "samples", "personal_epochs": 3},
        private=("head",),
        more_epochs=3,
        kind=on_factors(FedDPA, pair=0.4, personal=["*bias"]),
    ),
    Method("FedBuff", forms.averaging, forms.dense, {"weighting": "samples", "buffer_size": 2}),
    Method(
        "FedAsync",
        forms.averaging,
        forms.dense,
        {"weighting": "samples", "mixing": 0.9, "proximal_weight": 0.5},
        rounds=30,
    ),
]
