"""Errors in a user's own code: one line with the exception, the file and the line."""

import sys

import pytest

from tests.cli.configurations import NETWORK, PARTITION, SMALL, changed, write
from tests.commands import call

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("here")]

OWN = """
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from datamodules import DigitsDataModule, Partitioner
from torchmetrics import Metric
import numpy as np
from pfl.algorithms import FedAvg

class Net(nn.Module):
    def __init__(self, late: bool = False):
        super().__init__()
        self.late, self.layer = late, nn.Linear(64, 10)

    def forward(self, x):
        if not self.late or len(x) > 2:
            self.laier  # the network
        return self.layer(x.flatten(1))

class Leaves(Net):
    def __init__(self, status: int | str):
        super().__init__()
        self.status = status

    def forward(self, x):
        raise SystemExit(self.status)  # the network leaves

class Data(DigitsDataModule):
    def load(self):
        return {}["columns"]  # the data module

class Trains(FedAvg):
    def client_update(self, clients, w):
        return w + undefined  # client_update

class Serves(FedAvg):
    def server_update(self, mean):
        return mean["v"]

class Names(FedAvg):
    def client_update(self, clients, w):
        return {"q": self.local_sgd(clients, w)}

class Begins(FedAvg):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_client_state("a", torch.zeros(3))

class Personal(FedAvg):
    has_personalized = True

    def personalized(self, clients):
        return 1 / 0  # personalized

class Loss(nn.Module):
    def forward(self, outputs, targets):
        return outputs @ targets.float()  # the loss

class Nothing(nn.Module):
    def forward(self, outputs, targets):
        pass

class Undefined(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)) / 0

class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)).detach()

class Half(DigitsDataModule):
    def __init__(self, num_clients: int = 3):  # half
        pass

class Owners(Partitioner):
    def __init__(self, kind: str):
        self.kind = kind

    def owners(self, targets, num_clients, rng):
        clients = np.arange(len(targets)) % num_clients
        return {
            "short": clients[1:], "float": clients / 1, "large": clients + 1, "small": clients - 2
        }.get(self.kind)

    def describe(self):
        return ""

class Key(nn.Module):
    def __init__(self):
        super().__init__()
        {}["a"]  # the constructor

class Logs(FedAvg):
    def begin_round(self, clients):
        self.log_metric("a", "b")

class Taken(FedAvg):
    def begin_round(self, clients):
        self.log_metric("test/global/accuracy", 1.0)

class Undefined_(nn.Module):
    def forward(self, outputs, targets):
        return 0 / (0 * nn.functional.cross_entropy(outputs, targets, reduction="none"))

class Searches(Metric):
    higher_is_better = True

    def update(self, predicted, targets):
        pass

    def compute(self):
        return {}["a"]  # the metric

class Needs(Callback):
    def __init__(self, every):
        pass

class Worded(Partitioner):
    words = "every {n}th"

    def owners(self, targets, num_clients, rng):
        return np.arange(len(targets)) % num_clients

class Narrow(Callback):
    def on_train_epoch_end(self, trainer):  # the signature
        pass

class Locked(Callback):
    def state_dict(self):
        return {"f": lambda: 1}

class Unwritten(DigitsDataModule):
    from abc import abstractmethod

    @abstractmethod
    def columns(self): ...

class Back(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        int("x")  # the callback
"""
MODEL = "model.class_path"
CASES = {  # key, value, words of the line
    "the network": (NETWORK, {"class_path": "owncode.Net"}, ["network: Net", "AttributeError"]),
    "the data module": ("data.class_path", "owncode.Data", ["load failed: KeyError: 'columns'"]),
    "client_update": (MODEL, "owncode.Trains", ["client_update failed: NameError", "undefined"]),
    "personalized": (MODEL, "owncode.Personal", ["personalized failed: ZeroDivisionError"]),
    "the loss": (
        "model.init_args.loss",
        {"class_path": "owncode.Loss"},
        ["loss: Loss", "RuntimeError"],
    ),
    "the callback": (
        "trainer.callbacks",
        [{"class_path": "owncode.Back"}],
        ["on_train_epoch_end failed: ValueError: invalid literal"],
    ),
    "the metric": (
        "loop.metrics",
        [{"class_path": "owncode.Searches"}],
        ["Searches.compute failed: KeyError: 'a'"],
    ),
    "the constructor": (NETWORK, {"class_path": "owncode.Key"}, ["Key: 'a' (KeyError at "]),
    "half": ("data", {"class_path": "owncode.Half"}, ["Half.__init__ failed: AttributeError"]),
    "the signature": (
        "trainer.callbacks",
        [{"class_path": "owncode.Narrow"}],
        ["on_train_epoch_end failed: TypeError: ", "takes 2 positional arguments"],
    ),
}
LOSS = "model.init_args.loss"
REFUSED = {  # key, value, words of a line that needs no place
    **{
        f"owners: {kind}": (
            PARTITION,
            {"class_path": "owncode.Owners", "init_args": {"kind": kind}},
            ["Owners.owners: ", *words, "it must be integers [1797]"],
        )
        for kind, words in {
            "short": ["int64 [1796]"],
            "float": ["float64 [1797]"],
            "none": ["object []"],
            "large": ["clients from 1 to "],
            "small": ["clients from -2 to "],
        }.items()
    },
    "a message that is not sent": (
        MODEL,
        "owncode.Serves",
        ["reads the message 'v', which clients do not send; they send 'w'"],
    ),
    "a message of another name": (MODEL, "owncode.Names", ["message 'w'", "they send 'q'"]),
    "a state's first row": (
        MODEL,
        "owncode.Begins",
        [
            "Begins declares",
            "initial=tensor([0., 0., 0.])",
            "a function that returns the first row",
        ],
    ),
    "a loss that returns nothing": (
        LOSS,
        {"class_path": "owncode.Nothing"},
        ["loss: Nothing returns a NoneType for a batch of 2"],
    ),
    "outputs without a gradient": (
        NETWORK,
        {"class_path": "owncode.Detached", "init_args": {"in_features": 64, "out_features": 10}},
        ["network: the loss of Detached has no gradient", "detach()"],
    ),
    "outputs that are not finite": (
        NETWORK,
        {"class_path": "owncode.Undefined", "init_args": {"in_features": 64, "out_features": 10}},
        ["network: Undefined gives NaN"],
    ),
    "a text as a metric": (MODEL, "owncode.Logs", ["log_metric('a', 'b')", "must be a number"]),
    "a name of every run's": (MODEL, "owncode.Taken", ["log_metric('test/global/accuracy', 1.0)"]),
    "a loss that is not a number": (
        LOSS,
        {"class_path": "owncode.Undefined_"},
        ["loss: Undefined_ gives NaN for finite outputs before any training"],
    ),
    "a callback's argument without a type": (
        "trainer.callbacks",
        [{"class_path": "owncode.Needs"}],
        ["trainer.callbacks.every: null; Needs needs a value of it"],
    ),
    "words with an unknown name": (
        PARTITION,
        {"class_path": "owncode.Worded"},
        ["Worded.words: 'every {n}th'", "attributes of the rule in braces: KeyError: 'n'"],
    ),
    "a state that cannot be pickled": (
        "trainer.callbacks",
        [{"class_path": "owncode.Locked"}],
        ["last.ckpt: ", "trainer.callbacks: state_dict of Locked: Can't pickle", "return tensors"],
    ),
    "an abstract data module": (
        "data.class_path",
        "owncode.Unwritten",
        ["data: ", "owncode.Unwritten", "it is abstract: write columns"],
    ),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs `fit` with a value of the user's own; returns the status and standard error."""
    path = tmp_path / "owncode.py"
    path.write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "owncode", raising=False)

    def fit(key, value, *more):
        config = write(tmp_path / "a.yaml", changed(SMALL, key, value))
        root = ("--trainer.default_root_dir", tmp_path / "runs")
        status, _, err = call("fit", "--config", config, *root, *more)
        return status, err

    return path, fit


def line_of(comment):
    return next(n for n, line in enumerate(OWN.splitlines(), 1) if line.endswith(f"# {comment}"))


@pytest.mark.parametrize("case", CASES)
def test_an_error_is_one_line_with_its_place(run, case):
    path, fit = run
    key, value, words = CASES[case]
    status, err = fit(key, value)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    for word in [*words, f"{path}:{line_of(case)}", "--traceback"]:
        assert word in err, err


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_framework_cannot_use_is_one_line(run, case):
    _, fit = run
    key, value, words = REFUSED[case]
    status, err = fit(key, value)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    assert not [word for word in words if word not in err], err


def test_an_error_of_the_network_in_a_round(run):
    path, fit = run
    status, err = fit(NETWORK, {"class_path": "owncode.Net", "init_args": {"late": True}})
    assert status == 2 and err.count("\n") == 1, err
    line = line_of("the network")
    assert f"error: {path}:{line}: " in err and "forward failed: AttributeError" in err, err


@pytest.mark.parametrize(("code", "expected"), [(3, 3), (0, 1), ("so", 1)])
def test_a_network_that_leaves_the_program_ends_the_run_with_a_line(run, code, expected):
    path, fit = run
    value = {"class_path": "owncode.Leaves", "init_args": {"status": code}}
    status, err = fit(NETWORK, value)
    assert status == expected and err.count("\n") == 1, err
    line = line_of("the network leaves")
    assert f"error: {path}:{line}: " in err and f"forward failed: SystemExit: {code} " in err, err


def test_the_traceback_shows_everything(run):
    key, value, _ = CASES["the network"]
    with pytest.raises(Exception, match="laier"):
        run[1](key, value, "--traceback")
