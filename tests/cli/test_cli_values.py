"""The command line: values that are null, empty or of another type than their key."""

import pytest

from pfl.cli.app import FederatedCLI
from tests.cli.configurations import NETWORK, PARTITION, SMALL, assert_refused, changed, write
from tests.commands import call

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
    "null for a name": ("trainer.name", None, ["trainer.name: null", "str"]),
    "null for a list": ("loop.evaluate", None, ["loop.evaluate: null", "list"]),
    "null for a word": ("loop.sampling", None, ["loop.sampling: null", "'uniform', 'bernoulli'"]),
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
    "null of an optimizer": (
        OPTIMIZER,
        {"class_path": "torch.optim.SGD", "init_args": {"momentum": None}},
        ["model.optimizer.momentum: null", "float"],
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
    "empty trainer": ("trainer", None, ["trainer: null", "be left out"]),
    "a number for the trainer": ("trainer", 5, ["trainer: 5", "options"]),
    "a list for the loop": ("loop", [1], ["loop: [1]", "options"]),
    "no seed": ("seed_everything", False, ["seed_everything: false", "whole number"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line(tmp_path, mistake):
    key, value, words = MISTAKES[mistake]
    path = write(tmp_path / "mistake.yaml", changed(SMALL, key, value))
    assert_refused(tmp_path, words, "fit", "--config", path)


def test_a_config_file_before_the_subcommand_is_refused(tmp_path):
    path = write(tmp_path / "a.yaml", SMALL)
    for option in (["--config", path], [f"--config={path}"], ["-c", path]):
        assert_refused(tmp_path, ["config: ", "behind", "fit, val"], *option, "fit")


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
    early = [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/acc"}}]
    config = write(tmp_path / "a.yaml", changed(SMALL, "trainer.callbacks", early))
    status, _, err = call("fit", "--config", config, "--trainer.default_root_dir", tmp_path)
    assert status == 2 and err.count("\n") == 1, err
    assert "trainer.callbacks" in err and "`val/acc`" in err and "`val/global/accuracy`" in err
