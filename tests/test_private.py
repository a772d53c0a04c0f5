"""Private names of other packages are used in `pfl/_private.py` only, and exist."""

import ast
import importlib
import inspect
import pkgutil

import lightning.pytorch as pl
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.strategies import launchers
from torch import nn

import pfl
from tests.sources import PACKAGES, imports, sources

FENCE = "pfl._private"
# The owner of each private name that pfl/_private.py uses, and a method's leading parameters.
USED = [
    (pl.Trainer, "_run", ["self", "model", "ckpt_path"]),
    (pl.Trainer, "_run_stage", ["self"]),
    (launchers, "_SubprocessScriptLauncher", ["cluster_environment", "num_processes", "num_nodes"]),
    (launchers._SubprocessScriptLauncher, "_call_children_scripts", ["self"]),
    (ModelCheckpoint(), "_every_n_train_steps", None),
    (ModelCheckpoint(), "_train_time_interval", None),
    (WandbLogger(), "_experiment", None),
    (WandbLogger(), "_wandb_init", None),
    (WandbLogger(), "_id", None),
    (pl.LightningModule, "_apply", ["self", "fn", "recurse"]),
    (LightningCLI, "_parse_ckpt_path", ["self"]),
    (LightningCLI, "_run_subcommand", ["self", "subcommand"]),
    (ArgumentParser(), "_actions", None),
    (ArgumentParser().add_argument("--x", type=int | None), "_typehint", None),
    (torch.zeros(1), "_version", None),
    (nn.Linear(1, 1), "_forward_hooks", None),
    (nn.Linear(1, 1), "_forward_pre_hooks", None),
    (nn.Linear(1, 1), "_backward_hooks", None),
    (nn.Linear(1, 1), "_backward_pre_hooks", None),
]
DOCUMENTED = {"_exit", "_replace"}  # `os._exit` and that of named tuples are public


@pytest.mark.parametrize(("owner", "name", "parameters"), USED, ids=lambda value: str(value)[:40])
def test_the_installed_version_has_the_name(owner, name, parameters):
    value = getattr(owner, name)
    if parameters is not None:
        assert list(inspect.signature(value).parameters)[: len(parameters)] == parameters


@pytest.mark.parametrize("step", ["_parse_ckpt_path", "_run_subcommand"])
def test_lightnings_command_line_calls_the_steps_that_ours_replaces(step):
    assert step in LightningCLI.__init__.__code__.co_names


def is_private(name):
    """Names that also end with an underscore are documented ones, of Python or of `enum`."""
    return name.startswith("_") and not name.endswith("_")


def own_names(trees):
    """Private names that the packages define themselves."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def is_super(node):
    return isinstance(node, ast.Call) and getattr(node.func, "id", None) == "super"


def foreign_names(tree, own):
    """The private names of other packages that a module imports or accesses."""
    for module, name in imports(tree):
        if module.partition(".")[0] not in PACKAGES:
            yield from filter(is_private, [*module.split("."), name or ""])
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in own or is_super(node.value):
                yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            texts = [x.value for x in node.args[1:2] if isinstance(x, ast.Constant)]
            yield from (text for text in texts if is_private(text) and text not in own)


@pytest.fixture(scope="module")
def trees():
    return {name: tree for package in PACKAGES for name, tree in sources(package).items()}


@pytest.fixture(scope="module")
def own(trees):
    return own_names(tree for name, tree in trees.items() if name != FENCE)


def test_the_fence_uses_the_names_whose_existence_is_tested(trees, own):
    classes = inspect.getmembers(importlib.import_module(FENCE), inspect.isclass)
    overridden = {name for _, cls in classes if cls.__module__ == FENCE for name in overrides(cls)}
    accessed = set(foreign_names(trees[FENCE], own))
    assert accessed | overridden == {name for _, name, _ in USED}


def test_no_other_module_uses_private_names(trees, own):
    used = {
        name: sorted(set(foreign_names(tree, own)) - DOCUMENTED)
        for name, tree in trees.items()
        if name != FENCE
    }
    assert {name: names for name, names in used.items() if names} == {}


def test_no_class_overrides_a_private_method_of_another_package():
    overridden = set()
    for module in pkgutil.walk_packages(pfl.__path__, "pfl."):
        if module.name == FENCE or module.name.split(".")[1] == "__main__":
            continue
        for _, cls in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if cls.__module__ == module.name:
                overridden |= {(cls.__name__, name) for name in overrides(cls)}
    assert overridden == set()


def overrides(cls):
    """The private methods and properties of other packages' classes that a class overrides."""
    foreign = [b for b in cls.__mro__[1:] if b.__module__.partition(".")[0] not in PACKAGES]
    for name, value in vars(cls).items():
        method = inspect.isroutine(value) or isinstance(value, property)
        if method and is_private(name) and any(name in vars(base) for base in foreign):
            yield name
