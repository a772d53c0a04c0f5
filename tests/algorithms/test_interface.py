"""Methods use the documented interface of method authors and nothing else."""

import ast
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pfl.algorithms
import pfl.method
from tests.problems import least_squares

FILES = sorted(Path(pfl.algorithms.__file__).parent.rglob("[!_]*.py"))
EVERY_FILE = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
LIBRARIES = {"numpy", "torch"} | sys.stdlib_module_names
# Parts of a run that have a public counterpart on `FederatedAlgorithm`.
OF_THE_LOOP = {"trainer", "store", "ledger", "fit_loop"}


def imports(tree):
    """The modules that a file imports, and the names that it takes from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


def own_names(tree):
    """The attributes that a file's classes define: methods, annotations and `self.x = ...`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def foreign_attributes(tree):
    """Private attributes that a file reads without defining them, and parts of the loop."""
    own = set(own_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            if node.attr in OF_THE_LOOP or (private and node.attr not in own):
                yield node.attr


@EVERY_FILE
def test_a_method_imports_pfl_method_networks_and_libraries_only(file):
    for module, name in imports(ast.parse(file.read_text())):
        if module == "pfl.method":
            assert name in pfl.method.__all__
        elif not module.startswith("pfl.models"):  # networks, which know nothing of methods
            assert module.split(".")[0] in LIBRARIES, module


@EVERY_FILE
def test_a_method_reads_no_private_attribute_and_no_part_of_the_loop(file):
    assert list(foreign_attributes(ast.parse(file.read_text()))) == []


@pytest.mark.parametrize(
    "line", ["x = self._loop.seed", "self.trainer.max_epochs", "rows = self.store.read('w', ids)"]
)
def test_a_use_of_the_loop_would_show(line):
    assert list(foreign_attributes(ast.parse(line)))


def test_all_names_of_pfl_method_exist():
    assert all(hasattr(pfl.method, name) for name in pfl.method.__all__)
    assert sorted(pfl.method.__all__) == sorted(set(pfl.method.__all__))


def test_a_method_that_replaces_a_private_function_of_the_framework_is_refused():
    with pytest.raises(TypeError, match="Unlucky: _log_row"):
        type("Unlucky", (pfl.method.FederatedAlgorithm,), {"_log_row": lambda self: None})


def test_logging_before_the_first_round_is_not_an_error():
    method = pfl.algorithms.FedAgg(torch.nn.Linear(2, 1), local_epochs=1)
    method.log_metric("number", 1.0)
    method.log_table("rates", client=np.arange(2))
    method.log_loss("train", torch.ones(1), [1])
    assert method.participants == method.rounds == 0 and method.row == {}


class Facts(pfl.algorithms.FedAvg):
    """FedAvg with a kept message that starts at 2; records what it is told in each round."""

    def __init__(self, network, **kwargs):
        super().__init__(network, **kwargs)
        for declare in (self.add_client_state, self.keep_messages):
            declare("visits", lambda: torch.tensor([2.0, 0.0]))
        self.facts, self.evaluated = [], []

    def check_setup(self):
        assert (self.num_clients, self.max_rounds, self.seed) == (4, 3, 7)
        assert self.client_sizes.tolist() == [2, 3, 4, 5]
        assert self.problem_constant("smoothness") is None

    def client_update(self, clients, w):
        clients.state["visits"] = clients.state["visits"] + 1.0
        return {"w": super().client_update(clients, w), "visits": clients.state["visits"]}

    def server_update(self, received):
        assert received.keys() == {"w"}
        super().server_update(received)
        rows = self.kept_rows("visits", np.array([3, 0]))
        assert self.participant_ids.tolist() == self.cohort(self.rounds).tolist()
        seen = self.kept_ids("visits").tolist()
        self.facts.append((self.participant_ids.tolist(), self.participants, seen, rows.tolist()))
        self.mean = self.kept_mean("visits").tolist()
        parts = torch.cat(list(self.iter_kept("visits")))
        assert parts.mean(0).tolist() == self.mean

    def after_evaluation(self, row):
        self.evaluated.append(row["round"])


def test_facts_about_the_run_and_kept_messages(fit):
    """Clients 0, 1 and 2 visit once, twice and once; client 3 keeps the first value (2, 0)."""
    problem = least_squares((2, 3, 4, 5))
    method = Facts(problem.network())
    fit(method, problem, 3, trace=[[1, 2], [0], [1]], seed=7, clients_at_once=1)
    assert method.facts == [
        ([1, 2], 2, [1, 2], [[2.0, 0.0], [2.0, 0.0]]),
        ([0], 1, [0, 1, 2], [[2.0, 0.0], [3.0, 1.0]]),
        ([1], 1, [0, 1, 2], [[2.0, 0.0], [3.0, 1.0]]),
    ]
    assert method.mean == [2.0 + (1 + 2 + 1 + 0) / 4, (1 + 2 + 1 + 0) / 4]
    assert method.evaluated == []  # nobody has validation samples
