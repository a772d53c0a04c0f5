"""Every option has a user: a configuration, page, benchmark or example names it, or a reason."""

import inspect
import re

import pytest

import datamodules
import models
import pfl
from pfl import algorithms, callbacks, stages
from pfl.aggregation import attacks, privacy, robust
from pfl.rounds import clock
from tests.commands import ROOT

# Options that nothing names, and who needs them.
REASONS = {
    "CFL.most_clusters": "who expects more than eight groups of clients, and has the memory",
    "Dirichlet.max_retries": "a small alpha with a min_size; the refusal names it",
    "FedAS.alignment_epochs": "runs in which the alignment gets as many epochs as training",
    "FedBABU.finetune_part": "the paper's comparison of the three",
    "FedFomo.exploration_decay": "the paper's ε falls",
    "FedMRL.own_weight": "the paper's weight of the second loss",
    "FedPAC.head_lr": "the paper's η_h, which it has beside η",
    "FedPD.residual_tolerance": "the paper's ε_1, by which its Oracle I stops",
    "FedSpa.pruning_rate": "the paper's a_0",
    "FedSpa.pruning_rounds": "a run without trainer.max_epochs; the refusal names it",
    "FlukeClasses.class_per_client": "runs that repeat fluke's, where it has this name",
    "FlukeDirichlet.min_ex_class": "runs that repeat fluke's, where it has this name",
    "FlukeQuantity.min_quantity": "runs that repeat fluke's, where it has this name",
    "HeurFedAMP.own_weight": "the paper's ξ_ii, which it tunes",
    "HuggingFaceDataModule.revision": "a run that is to be repeated after the hub's data change",
    "HuggingFaceDataModule.test_split": "data sets whose split is called otherwise",
    "HuggingFaceDataModule.train_split": "data sets whose split is called otherwise",
    "HuggingFaceDataModule.image_mode": "gray and coloured images together; the refusal names it",
    "IFCA.perturbation": "a network whose values are all alike; the refusal names it",
    "PerFedAvg.adaptation_steps": "scores after more steps than in training, as in MAML",
    "pFedHN.server_momentum": "the paper's server is SGD with momentum; 0 is plain SGD",
    "ClientParallelStrategy.process_group_backend": "GPUs that NCCL does not reach",
    "ClientParallelStrategy.start_method": "notebooks, for which `auto` gives fork",
    "TableDataModule.test_file": "test samples in a file of their own",
    "Trainer.num_sanity_val_steps": "an evaluation before a first round of hours",
    "Trainer.plugins": "clusters and precisions that Lightning has as plugins",
    "Trainer.use_distributed_sampler": "Lightning's, with another default, which its CLI shows",
}
PACKAGES = (
    pfl,
    algorithms,
    callbacks,
    stages,
    attacks,
    privacy,
    robust,
    clock,
    datamodules,
    models,
)


def options() -> dict[str, str]:
    """The optional arguments of the public classes' own constructors, by the class and the name."""
    found = {}
    for package in PACKAGES:
        for name in getattr(package, "__all__", None) or vars(package):
            cls = getattr(package, name)
            if not isinstance(cls, type) or not cls.__module__.startswith("pfl."):
                continue
            if "__init__" in vars(cls):
                for argument in inspect.signature(cls).parameters.values():
                    if argument.default is not argument.empty:
                        found[f"{cls.__name__}.{argument.name}"] = argument.name
    return found


@pytest.fixture(scope="module")
def words() -> set[str]:
    """The words of all configurations, pages, benchmarks and examples."""
    paths = [ROOT / "README.md", ROOT / "datamodules" / "README.md"]
    for folder in ("configs", "docs", "benchmarks", "examples"):
        for ending in ("yaml", "md", "ipynb", "py", "sh"):
            paths += (ROOT / folder).rglob(f"*.{ending}")
    ours = [path for path in paths if ".cache" not in path.parts]  # not the packages of peers
    return {word for path in ours for word in re.findall(r"\w+", path.read_text())}


def test_every_option_is_named_somewhere_or_has_a_reason(words):
    unnamed = {option for option, name in options().items() if name not in words}
    assert unnamed - REASONS.keys() == set(), "name a user, or leave the option out"
    assert REASONS.keys() - unnamed == set(), "these need no reason, or are gone"
