"""Methods use the documented interface of method authors and nothing else."""

import ast
import sys
from pathlib import Path

import pytest

import pfl.algorithms
import pfl.method

FILES = sorted(Path(pfl.algorithms.__file__).parent.glob("[!_]*.py"))
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
def test_a_method_imports_pfl_method_and_libraries_only(file):
    for module, name in imports(ast.parse(file.read_text())):
        if module == "pfl.method":
            assert name in pfl.method.__all__
        else:
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
