"""The round can be read: one function, few functions below it, and no word of what it has not."""

import ast
import inspect
import os
import re
import sys
import threading

import lightning.pytorch as pl
import pytest

from datamodules import DigitsDataModule, Dirichlet
from models import MLP
from pfl import FederatedLoop
from pfl.algorithms import FedAvg
from pfl.method import round as round_file
from tests.problems import quiet
from tests.sources import ROOT, sources

FUNCTIONS = 82  # of our own in a plain round of FedAvg, without comprehensions
FILES = 26
DEPTH = 15
OF_STAGES = re.compile(r"privacy|private|robust|attack|factor|buffer|pool", re.IGNORECASE)


def test_the_round_is_one_function_without_a_word_of_stages():
    assert len(inspect.getsource(round_file.run_round).splitlines()) <= 100
    assert OF_STAGES.findall(inspect.getsource(round_file)) == []


class Trace(pl.Callback):
    """Notes which of our functions run in the third round, in all threads."""

    def __init__(self):
        self.functions, self.depth = set(), 0

    def on_train_batch_start(self, trainer, *_):
        if trainer.current_epoch == 2:
            threading.setprofile(self.note)
            sys.setprofile(self.note)

    def on_train_batch_end(self, trainer, *_):
        sys.setprofile(None)
        threading.setprofile(None)

    def note(self, frame, event, _):
        if event != "call" or not ours(frame):
            return
        code = frame.f_code
        self.functions.add((os.path.realpath(code.co_filename), code.co_qualname))
        depth = 0
        while frame is not None:
            depth += ours(frame)
            frame = frame.f_back
        self.depth = max(self.depth, depth)


def ours(frame):
    """Whether a frame is of the packages; what Lightning's Trainer is around a round is not."""
    path = os.path.realpath(frame.f_code.co_filename)
    packages = tuple(str(ROOT / name) + os.sep for name in ("pfl", "models", "datamodules"))
    of_lightning = "RunTrainer" in frame.f_code.co_qualname
    return path.startswith(packages) and not of_lightning


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames have no qualified names")
@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or coverage traces")
@pytest.mark.skipif("pfl.engines.chains" not in sys.modules, reason="another engine has more")
def test_a_plain_round_calls_few_functions_in_few_files(tmp_path, threads):
    threads(1)
    trace = Trace()
    trainer = quiet(tmp_path, 3, trace, enable_checkpointing=False)
    data = DigitsDataModule(num_clients=20, partition=Dirichlet(0.1))
    method = FedAvg(MLP(64, (64,)), lr=0.05)
    trainer.fit(method, datamodule=FederatedLoop(data, clients_per_round=5, evaluate=()))
    named = {(path, name) for path, name in trace.functions if not name.endswith(">")}
    assert ("run_round") in {name for _, name in named}
    assert len(named) <= FUNCTIONS
    assert len({path for path, _ in named}) <= FILES
    assert trace.depth <= DEPTH
    assert list(method.stages) == []


def test_nothing_outside_of_a_method_assigns_to_it():
    names = {"method", "algorithm", "pl_module"}
    found = []
    for module, tree in sources("pfl").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                parts = ast.unparse(node).replace("self.", "", 1).lstrip("_").split(".")
                if parts[0] in names and len(parts) > 1:
                    found.append((module, ast.unparse(node)))
    assert found == []
