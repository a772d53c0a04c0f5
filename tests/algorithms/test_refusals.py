"""What methods refuse before training, in one line that names the argument and what is right."""

import numpy as np
import pytest
import torch
from torch import nn

import pfl.algorithms
from models import MLP, SmallCNN
from tests.algorithms.class_world import several_labels
from tests.problems import owned
from tests.refusal import refused

ADAM = torch.optim.Adam
L2GD_DRAWS = "the default, as L2GD draws the number of local steps"
REFUSED = [  # method, argument, value, what would be right; in methods' order
    ("APFL", "alpha", -0.1, "from 0 to 1"),
    ("APFL", "alpha", 1.5, "from 0 to 1"),
    ("APFL", "alpha", float("nan"), "from 0 to 1"),
    ("APFL", "optimizer", ADAM, "leave it out"),
    ("CFL", "mean_norm", -1.0, "at least 0"),
    ("CFL", "largest_norm", -1.0, "at least 0"),
    ("CFL", "most_clusters", 0, "at least 1"),
    ("Ditto", "penalty", -1.0, "at least 0"),
    ("Ditto", "personal_epochs", 0, "at least 1"),
    ("FedACS", "quantile", -0.1, "from 0 to 1, or null"),
    ("FedACS", "quantile", 1.5, "from 0 to 1, or null"),
    ("FedACS", "candidates", "everyone", "participants or all"),
    ("FedAdagrad", "beta", 1.0, "at least 0 and below 1"),
    ("FedAdam", "server_lr", 0.0, "positive"),
    ("FedAdam", "betas", (0.9, 1.0), "two numbers of at least 0 and below 1"),
    ("FedAdam", "betas", (0.9,), "two numbers of at least 0 and below 1"),
    ("FedYogi", "tau", 0.0, "positive"),
    ("FedAgg", "rate_penalty", 0.0, "positive and below 1"),
    ("FedAgg", "rate_penalty", -0.1, "positive and below 1"),
    ("FedAgg", "rate_penalty", 1.5, "positive and below 1"),
    ("FedAgg", "max_rate", 0.05, "at least lr, 0.1"),
    ("FedAgg", "max_rate", -1.0, "positive"),
    ("FedAgg", "damping_steps", 0, "at least 1"),
    ("FedAgg", "mean_field", "exact", "damped or fixed_point"),
    ("FedAgg", "dynamics", "others", "own or aggregated"),
    ("FedAgg", "tolerance", -1e-3, "positive"),
    ("FedAgg", "local_epochs", 0, "at least 1"),
    ("FedAgg", "local_steps", 5, "leave it out"),  # it has a rate for each local epoch
    ("FedALA", "share", 0.0, "positive and at most 1"),
    ("FedALA", "share", 1.5, "positive and at most 1"),
    ("FedALA", "weight_lr", 0.0, "positive"),
    ("FedALA", "threshold", 0.0, "positive"),
    ("FedALA", "window", 1, "at least 2"),
    ("FedAMP", "alpha", 0.0, "positive"),
    ("FedAMP", "alpha_decay", 1.5, "positive and at most 1"),
    ("FedAMP", "decay_rounds", 0, "at least 1"),
    ("FedAMP", "sigma", -1.0, "positive"),
    ("FedAMP", "penalty", -0.5, "at least 0"),
    ("HeurFedAMP", "own_weight", 1.2, "from 0 to 1, or null"),
    ("HeurFedAMP", "sigma", 0.0, "positive"),
    ("FedBABU", "finetune_epochs", 0, "at least 1"),
    ("FedBABU", "finetune_part", "all", "body or head or full"),
    ("FedCLUP", "penalty", -0.1, "a number of at least 0"),
    ("FedCLUP", "penalty", "corollary", "a number of at least 0 or corollary1"),
    ("FedCLUP", "penalty_schedule", "linear", "constant or plateau or authors_code"),
    ("FedCLUP", "server_step", 0.0, "positive"),
    ("FedCLUP", "server_step", "inverse", "a positive number or inverse_penalty"),
    ("FedCLUP", "local_step", "corollary1", "lr or corollary2"),
    ("FedCLUP", "smoothness", 0.0, "positive"),
    ("FedCLUP", "strong_convexity", 0.0, "positive"),
    ("FedCLUP", "heterogeneity", -1.0, "at least 0"),
    ("FedCLUP", "noise", -1.0, "positive"),
    ("FedCLUP", "growth", 0.5, "above 1"),
    ("FedCLUP", "patience", 0, "at least 1"),
    ("FedCLUP", "tolerance", -1e-3, "at least 0"),
    ("FedCLUP", "max_penalty", 0.1, "at least the first penalty, 0.5"),  # it would be lowered
    ("FedAS", "alignment_lr", 0.0, "positive"),
    ("FedAS", "alignment_epochs", 0, "at least 1"),
    ("FedAsync", "mixing", 0.0, "positive and at most 1"),
    ("FedAsync", "mixing", 1.5, "positive and at most 1"),
    ("FedAsync", "exponent", -1.0, "at least 0"),
    ("FedAsync", "slope", -1.0, "at least 0"),
    ("FedAsync", "delay", -1, "at least 0"),
    ("FedAsync", "proximal_weight", -1.0, "at least 0"),
    ("FedDBE", "penalty", -1.0, "at least 0"),
    ("FedDBE", "momentum", 0.0, "positive and at most 1"),
    ("FedDBE", "momentum", 1.5, "positive and at most 1"),
    ("FedGH", "server_lr", 0.0, "positive"),
    ("FedGH", "server_epochs", 0, "at least 1"),
    ("FedGH", "server_batch_size", 0, "at least 1, or null"),
    ("FedLC", "calibration", -1.0, "at least 0"),
    ("FedDyn", "alpha", 0.0, "positive"),
    ("FedNova", "proximal_weight", -1.0, ""),
    ("FedNova", "proximal_weight", 10.1, ""),  # η μ is at most 1 with η = 0.1
    ("FedNova", "optimizer", torch.optim.SGD, "leave it out"),
    ("FedNTD", "distillation", -1.0, "at least 0"),
    ("FedNTD", "temperature", 0.0, "positive"),
    ("FedPAC", "penalty", -1.0, "at least 0"),
    ("FedPAC", "head_epochs", 0, "at least 1"),
    ("FedPAC", "head_lr", 0, "positive"),
    ("FedPD", "proximal_step", 0.0, "positive"),
    ("FedPD", "skip_probability", 1.0, ""),
    ("FedPD", "skip_probability", -0.1, ""),
    ("FedPD", "communication_period", 0, "at least 1"),
    ("FedPD", "residual_tolerance", -1e-3, ""),
    ("FedPD", "refresh_period", 0, "at least 1"),
    ("FedPD", "inner_step", 0.0, "positive"),
    ("FedProto", "penalty", -1.0, "at least 0"),
    ("FedProx", "proximal_weight", -0.1, "at least 0"),
    ("FedRep", "head_epochs", 0, "at least 1"),
    ("FedSLR", "proximal_step", 0.0, "positive"),
    ("FedSLR", "low_rank_penalty", -0.1, "at least 0"),
    ("FedSLR", "sparse_penalty", -0.1, "at least 0"),
    ("FedSLR", "personal_epochs", 0, "at least 1"),
    ("FedSLR", "personal_start", "global", "zero or initial"),
    # An MLP 64-8-10 has 18 biases and 2 weight matrices: at least 20 of 610 values.
    ("FedSpa", "density", 0.0, "positive and at most 1"),
    ("FedSpa", "density", 0.03, "at most 1, and at least 0.0328 for this network"),
    ("FedSpa", "density", 1.5, "at most 1"),
    ("FedSpa", "pruning_rate", 1.2, "from 0 to 1"),
    ("FedSpa", "pruning_rounds", 0, "at least 1, or null"),
    ("FedSpa", "layers", "best", "erk or uniform"),
    ("Floco", "endpoints", 0, "at least 1"),
    ("Floco", "projection_round", 0, "at least 1"),
    ("Floco", "radius", -0.1, "at least 0"),
    ("GPGD", "low_rank_penalty", -0.1, "at least 0"),
    ("IFCA", "clusters", 0, "at least 1"),
    ("IFCA", "perturbation", 0.0, "positive"),
    ("L2GD", "penalty", -0.1, "at least 0"),
    ("L2GD", "averaging_probability", 0.0, "positive and below 1"),
    ("L2GD", "averaging_probability", 1.0, "positive and below 1"),
    ("L2GD", "local_steps", 5, f"null, {L2GD_DRAWS}"),
    ("L2GD", "local_epochs", 2, f"1, {L2GD_DRAWS}"),
    ("L2GD", "optimizer", ADAM, "plain local steps"),
    ("L2GD", "penalty", 2.6, "at most p / (lr (1 - p)) = 2.5"),  # 0.2 / (0.1 * 0.8)
    ("LPGD", "low_rank_penalty", -0.1, "at least 0"),
    ("MOON", "contrast", -1.0, "at least 0"),
    ("MOON", "temperature", 0.0, "positive"),
    ("MRMTL", "penalty", -0.1, "at least 0"),
    ("PerFedAvg", "alpha", 0.0, "positive"),
    ("PerFedAvg", "variant", "SO", "FO or HF"),
    ("PerFedAvg", "delta", -1e-3, "positive"),
    ("PerFedAvg", "adaptation_steps", 0, "at least 1"),
    ("PerFedAvg", "optimizer", ADAM, "leave it out"),
    ("pFedHN", "server_lr", 0.0, "positive"),
    ("pFedHN", "server_momentum", 1.0, "at least 0 and below 1"),
    ("pFedHN", "server_momentum", -0.1, "at least 0 and below 1"),
    ("pFedHN", "server_weight_decay", -1.0, "at least 0"),
    ("pFedHN", "embedding", 0, "at least 1, or null"),
    ("pFedHN", "width", 0, "at least 1"),
    ("pFedHN", "hidden_layers", -1, "at least 0"),
    ("pFedMe", "penalty", 0.0, "positive"),
    ("pFedMe", "personal_steps", 0, "at least 1"),
    ("pFedMe", "personal_lr", -0.1, "positive"),
    ("pFedMe", "server_mixture", 0.0, "positive"),
    ("pFedMe", "lr", 0.1, "at most 1 / penalty, 0.06667"),  # 1 / 15
    ("pFedMe", "optimizer", ADAM, "leave it out"),
    ("SCAFFOLD", "server_lr", 0.0, "positive"),
    ("SCAFFOLD", "option", "III", "I or II"),
    ("SCAFFOLD", "optimizer", ADAM, "leave it out"),
]


@pytest.mark.parametrize(("kind", "key", "value", "right"), REFUSED)
def test_impossible_values_are_refused(kind, key, value, right):
    shown = "" if key == "optimizer" else repr(value)
    with refused(f"model.{key}: {shown}", right):
        getattr(pfl.algorithms, kind)(MLP(64, (8,)), **{key: value})


# What methods set in place of their user: the server's step, equal weights, or whose statistics.
FIXED = {
    "server_optimizer": "APFL CFL FedAdam FedAgg FedAMP FedBABU FedCLUP FedDyn FedGH FedPD FedPer "
    "FedProto FedSLR FedSpa FlexLoRA GlobalTrain GPGD IFCA L2GD LocalTrain MRMTL PerFedAvg pFedMe "
    "RoLoRA SCAFFOLD",
    "weighting": "APFL FedAMP FedDyn FedGH FedPD FedProto FedSLR FedSpa GlobalTrain GPGD L2GD "
    "LocalTrain LPGD MRMTL PerFedAvg pFedMe SCAFFOLD",
    "buffers": "CFL FedBN FedGH FedProto GlobalTrain LGFedAvg LocalTrain",
}
POSSIBLE = {"server_optimizer": None, "weighting": "samples", "buffers": "local"}


@pytest.mark.parametrize(("key", "kind"), [(k, kind) for k in FIXED for kind in FIXED[k].split()])
def test_what_a_method_sets_itself_cannot_be_given(key, kind):
    with pytest.raises(TypeError, match=f"multiple values for keyword argument '{key}'"):
        getattr(pfl.algorithms, kind)(SmallCNN(), **{key: POSSIBLE[key]})


@pytest.mark.parametrize("kind", ["FedAS", "FedGH", "FedPAC", "FedProto", "FedRoD"])
def test_a_head_that_is_not_a_linear_layer_is_refused(kind):
    with refused(f"model.network: the head '1' of Sequential is a Conv2d; {kind} needs a linear"):
        getattr(pfl.algorithms, kind)(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 3, 3)))


@pytest.mark.parametrize("labels", ["numbers", "several numbers"])
@pytest.mark.parametrize("kind", ["FedAS", "FedLC", "FedNTD", "FedPAC", "FedProto", "FedRoD"])
def test_targets_that_are_not_classes_are_refused(fit, kind, labels):
    """Regression, or labels 0.0 and 1.0 of several kinds: without classes these are not the
    paper's methods."""
    targets = torch.ones(4) if labels == "numbers" else torch.ones(4, 2)
    outputs = targets.numel() // 4
    network = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, outputs)).double()
    data = owned(np.arange(4), torch.rand(4, 3).double(), targets.double())
    with refused("data: the targets are not classes", f"{kind} needs one class per sample"):
        fit(getattr(pfl.algorithms, kind)(network), data, 1)


@pytest.mark.parametrize(
    "kind", ["FedAS", "FedGH", "FedLC", "FedNTD", "FedPAC", "FedProto", "FedRoD"]
)
def test_several_labels_per_sample_are_refused(fit, kind):
    network, data = several_labels()
    with refused(f"data: the targets are several labels per sample; {kind} needs one"):
        fit(getattr(pfl.algorithms, kind)(network), data, 1)
