"""The command line: values that are null, empty or of another type than their key."""

import math

import pytest
import torch

from models import MLP
from pfl import algorithms
from pfl.configuration.app import FederatedCLI
from pfl.configuration.files import read
from tests.cli.configurations import NETWORK, PARTITION, SMALL, assert_refused, changed, write
from tests.commands import call
from tests.refusal import refused

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("here")]

OPTIMIZER = "model.init_args.optimizer"
MISTAKES = {
    "a list for a class": (PARTITION, ["IID"], ["data.partition: ['IID']", "Dirichlet"]),
    "a number for a network": (NETWORK, 5, ["model.network: 5", "Classifier", "MLP"]),
    "empty init_args": (
        PARTITION,
        {"class_path": "IID", "init_args": None},
        ["data.partition: {'class_path': 'IID', 'init_args': None}", "be left out"],
    ),
    "null for a number": ("model.init_args.lr", None, ["model.lr: null", "float"]),
    "null for a word": ("loop.sampling", None, ["loop.sampling: null", "'uniform', 'bernoulli'"]),
    "a word that YAML reads as false": (  # as of the classes no and yes
        "trainer.name",
        False,
        ["trainer.name: False", "it must be str; YAML reads yes, no", "in quotes"],
    ),
    "null within": (
        "data.init_args.protocol",
        {"class_path": "SplitOwn", "init_args": {"test": None}},
        ["data.protocol.test: null", "float"],
    ),
    "null in a list": (
        "trainer.callbacks",
        [{"class_path": "ModelCheckpoint", "init_args": {"mode": None}}],
        ["trainer.callbacks.mode: null", "str"],
    ),
    "number of an optimizer": (
        OPTIMIZER,
        {"class_path": "torch.optim.SGD", "init_args": {"momentum": "x"}},
        ["model.optimizer.momentum: x", "float"],
    ),
    "option of an optimizer": (
        OPTIMIZER,
        {"class_path": "torch.optim.SGD", "init_args": {"momentun": 0.9}},
        ["model.optimizer: SGD", "'momentun'", "'momentum'"],
    ),
    "no optimizer": (
        OPTIMIZER,
        {"class_path": "torch.optim.lr_scheduler.StepLR"},
        ["model.optimizer: ", "torch.optim.lr_scheduler.StepLR", "Optimizer"],
    ),
    "a server optimizer that needs more": (
        "model.init_args.server_optimizer",
        {"class_path": "torch.optim.LBFGS"},
        ["model.server_optimizer: ", "closure", "SGD, Adam"],
    ),
    "empty loop": ("loop", None, ["loop: null", "be left out"]),
    "a list for the loop": ("loop", [1], ["loop: [1]", "options"]),
    "a number for a class": (f"{PARTITION}.class_path", 5, ["data.partition: ", "name a class"]),
    "a list for options": (f"{NETWORK}.init_args", [1], ["model.network: ", "hold options"]),
    "a network without a class": (
        NETWORK,
        {"in_features": 64},
        ["model.network: ", "'in_features'", "class_path", "MLP"],
    ),
    "a method without a class": (
        "model",
        {"init_args": SMALL["model"]["init_args"]},
        ["model: class_path", "FedAvg"],
    ),
    "a callback without a class": ("trainer.callbacks", [{}], ["trainer.callbacks: class_path"]),
    "no number of seconds": (
        "trainer.callbacks",
        [{"class_path": "RoundCheckpoint", "init_args": {"every_seconds": math.nan}}],
        ["RoundCheckpoint.every_seconds: nan", "at least 0"],
    ),
    "no rounds": ("trainer.max_epochs", 0, ["trainer.max_epochs: 0", "at least 1"]),
    "logs of no step": ("trainer.log_every_n_steps", 0, ["trainer.log_every_n_steps: 0"]),
    "a negative seed": ("loop.seed", -1, ["loop.seed: -1", "at least 0"]),
    "scaled losses": ("trainer.precision", "16-mixed", ["trainer.precision: '16-mixed'"]),
    "a name with a line break": ("trainer.name", "a\nb", ["trainer.name: 'a\\nb'"]),
    "a name with NUL": ("trainer.name", "a\0b", ["config: ", "line", "'a\\x00b'", "NUL"]),
    "an infinite rate": (
        "model.init_args.server_optimizer",
        {"class_path": "torch.optim.SGD", "init_args": {"lr": math.inf}},
        ["model.server_optimizer.lr: inf", "finite"],
    ),
    "no momentum": (
        OPTIMIZER,
        {"class_path": "torch.optim.SGD", "init_args": {"momentum": math.nan}},
        ["model.optimizer.momentum: nan", "finite"],
    ),
    "an abstract class": (
        "data.class_path",
        "FederatedDataModule",
        ["data: the class is abstract; known are AgentLogistic, ArrayDataModule"],
    ),
    "the same steps twice": ("loop.finetune", [1, 1], ["loop.finetune: [1, 1]", "different"]),
    "no end of memory": ("loop.state_memory", 1e300, ["loop.state_memory: 1e+300", "GiB"]),
    "a rate beyond float32": ("model.init_args.lr", 1e300, ["model.lr: 1e+300", "below 1e38"]),
    "a huge batch": (
        "model.init_args.batch_size",
        10**30,
        ["model.batch_size: 1000", "of at least 1 and below 2**63"],
    ),
    "a growing rate": ("model.init_args.lr_decay", 1e40, ["model.lr_decay: 1e+40", "at most 1"]),
    "two rates": (
        OPTIMIZER,
        {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}},
        ["model.optimizer.lr: 0.5; the local rate is model.lr, 0.1"],
    ),
    "an empty layer": (
        f"{NETWORK}.init_args.hidden",
        [0],
        ["parameter body.linear1.weight of MLP has the shape [0, 64]", "at least 1"],
    ),
    "a negative size": (
        f"{NETWORK}.init_args.hidden",
        [-3],
        ["MLP(in_features=64, hidden=[-3], num_classes=10); every size must be at least 1"],
    ),
    "a layer that no memory holds": (
        f"{NETWORK}.init_args.hidden",
        [10**15],
        ["hidden=[1000000000000000]", "needs more memory than there is"],
    ),
    "a rule": ("loop.aggregation", "Mediann", ["'Mediann'", "did you mean 'Median'?"]),
    "few clients for a rule": (
        "loop.aggregation",
        {"class_path": "Krum", "init_args": {"attackers": 3}},
        ["loop.aggregation: Krum needs at least 9 clients' messages", "there are 3"],
    ),
    "one transform for a list": (
        "data.init_args.transforms",
        {"class_path": "ClientNoise"},
        ["data.transforms: {'class_path': 'ClientNoise'}", "list[Transform], null"],
    ),
    "no seed": ("seed_everything", False, ["seed_everything: false", "whole number"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line(tmp_path, mistake):
    key, value, words = MISTAKES[mistake]
    path = write(tmp_path / "mistake.yaml", changed(SMALL, key, value))
    assert_refused(tmp_path, words, "fit", "--config", path)


WORDS = {
    "no value": (["--model.lr"], ["model.lr: it has no value", "--model.lr VALUE"]),
    "no value in the middle": (["--model.lr", "--loop.seed", "1"], ["model.lr: it has no value"]),
    "an escape sequence": (["--model.\x1b[2J", "1"], [r"FedAvg has no option '\x1b[2J'"]),
    "GPUs that are not there": (
        ["--trainer.devices", "99", "--trainer.accelerator", "gpu"],
        ["trainer: devices: 99, accelerator: gpu; "],
    ),
}


@pytest.mark.parametrize("case", WORDS)
def test_a_word_of_the_command_line_gets_one_line(tmp_path, case):
    if case == "GPUs that are not there" and torch.cuda.device_count() >= 99:
        pytest.skip("they are there")
    options, words = WORDS[case]
    path = write(tmp_path / "a.yaml", SMALL)
    runs = ("--trainer.default_root_dir", tmp_path / "runs")
    status, _, err = call("fit", "--config", path, *runs, *options)
    assert (status, err.count("\n")) == (2, 1), err
    assert not [word for word in words if word not in err], err


def test_a_config_file_before_the_subcommand_is_refused(tmp_path):
    path = write(tmp_path / "a.yaml", SMALL)
    for option in (["--config", path], [f"--config={path}"], ["-c", path]):
        assert_refused(tmp_path, ["config: ", "after", "fit, val"], *option, "fit")


def test_null_is_accepted_where_the_type_includes_it(monkeypatch, tmp_path):
    monkeypatch.setattr(FederatedCLI, "run_subcommand", lambda self, subcommand: None)
    config = changed(SMALL, "trainer.callbacks", None)
    config = changed(config, "model.init_args.batch_size", None)
    adam = {"class_path": "torch.optim.Adam", "init_args": {"foreach": None}}
    path = write(tmp_path / "a.yaml", changed(config, OPTIMIZER, adam))
    cli = FederatedCLI(["fit", "--config", str(path)])
    assert cli.model.batch_size is None and cli.datamodule.datamodule.protocol is not None


OWN = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, features, width=8):
        super().__init__(nn.Flatten(), nn.Linear(features, width or 10))
"""


def test_options_of_a_class_without_types_are_checked_by_name(monkeypatch, tmp_path):
    (tmp_path / "untyped.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    net = {"class_path": "untyped.Net", "init_args": {"features": 64, "widht": 4}}
    config = write(tmp_path / "a.yaml", changed(SMALL, NETWORK, net))
    words = ["model.network: Net", "'widht'", "'width'"]
    assert_refused(tmp_path, words, "fit", "--config", config)
    net["init_args"] = {"features": {"class_path": "MLP", "init_args": {"in_features": 64}}}
    path = write(tmp_path / "a.yaml", changed(SMALL, NETWORK, net))
    words = ["model.network: 'MLP'", "annotate the argument", "full import path"]
    assert_refused(tmp_path, words, "fit", "--config", path)
    net["init_args"] = {"features": 64, "width": None}  # which may have a meaning there
    monkeypatch.setattr(FederatedCLI, "run_subcommand", lambda self, subcommand: None)
    status, _, err = call(
        "fit", "--config", write(tmp_path / "a.yaml", changed(SMALL, NETWORK, net))
    )
    assert (status, err) == (0, "")


def test_callbacks_that_cannot_work_are_refused(tmp_path):
    twice = [{"class_path": "RunRecorder"}] * 2
    config = write(tmp_path / "a.yaml", changed(SMALL, "trainer.callbacks", twice))
    words = ["trainer: Found more than one", "RunRecorder"]
    status, _, err = call("fit", "--config", config, "--trainer.default_root_dir", tmp_path)
    assert status == 2 and err.count("\n") == 1 and all(word in err for word in words), err


TEXTS = {
    "a key twice": (
        "trainer: {max_epochs: 2}\nmodel:\n  lr: 1\n  lr: 2\n",
        ["line 4: lr", "twice"],
    ),
    "a group twice": ("loop: {}\ndata: {}\nloop: {seed: 1}\n", ["line 3: loop", "twice"]),
    "an alias of itself": ("loop: &a\n  evaluate: *a\n", ["line 1", "alias"]),
    "an alias of itself in a list": ("loop:\n  evaluate: &a [val, [*a]]\n", ["line 2", "alias"]),
}


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.parametrize("command", ["fit", "compare", "reproduce"])
def test_a_key_twice_and_an_alias_of_itself_are_refused(tmp_path, case, command):
    text, words = TEXTS[case]
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    if command == "fit":
        assert_refused(tmp_path, [str(path), *words], "fit", "--config", path)
        return
    status, _, err = call(command, path)
    assert status == 2 and err.count("\n") == 1, err
    assert not [word for word in [str(path), *words] if word not in err], err


def test_an_alias_of_something_else_is_what_it_stands_for(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: &x {b: 1}\nc: [*x, *x]\nd:\n  <<: *x\n  b: 2\n")
    assert read(path) == {"a": {"b": 1}, "c": [{"b": 1}, {"b": 1}], "d": {"b": 2}}


INFINITE = {
    "FedProx": "proximal_weight",
    "FedSLR": "low_rank_penalty",
    "FedCLUP": "server_step",
    "FedAMP": "sigma",
    "FedPD": "proximal_step",
    "SCAFFOLD": "server_lr",
    "Ditto": "penalty",
}


@pytest.mark.parametrize("method", INFINITE)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_penalties_and_steps_must_be_finite(method, value):
    with refused(f"model.{INFINITE[method]}: {value}", "finite"):
        getattr(algorithms, method)(MLP(64), **{INFINITE[method]: value})


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_an_untrained_network_is_evaluated_only_if_asked(tmp_path, command):
    path = write(tmp_path / "a.yaml", SMALL)
    words = ["ckpt_path: null", "untrained", "--untrained true"]
    assert_refused(tmp_path, words, command, "--config", path)
    asked = ("--untrained", "true", "--trainer.default_root_dir", tmp_path / "runs")
    status, _, err = call(command, "--config", path, *asked)
    assert (status, err) == (0, "")


DATA = """
import torch
from datamodules import TensorDataModule

class WithoutSeed(TensorDataModule):
    def __init__(self, floating: bool = False):
        inputs = torch.randn(80, 64, generator=torch.Generator().manual_seed(0))
        targets = torch.arange(80) % 10
        super().__init__(inputs, targets.float() if floating else targets, num_clients=4)
"""


def test_an_own_data_module(tmp_path, monkeypatch):
    """It needs no seed; labels that are floating are told where they are."""
    (tmp_path / "owndata.py").write_text(DATA)
    monkeypatch.syspath_prepend(tmp_path)
    path = write(tmp_path / "a.yaml", {**SMALL, "data": {"class_path": "owndata.WithoutSeed"}})
    status, _, err = call("fit", "--config", path, "--trainer.default_root_dir", tmp_path / "one")
    assert (status, err) == (0, "")
    words = ["data: the targets", "torch.float32", "targets.long()"]
    assert_refused(tmp_path, words, "fit", "--config", path, "--data.floating", "true")


def test_optimality_that_has_nothing_to_measure_is_refused(tmp_path):
    local = changed(SMALL, "model.class_path", "LocalTrain")
    path = write(tmp_path / "a.yaml", changed(local, "trainer.callbacks", ["Optimality"]))
    words = ["trainer.callbacks: Optimality", "DigitsDataModule", "LocalTrain"]
    assert_refused(tmp_path, words, "fit", "--config", path)
