"""Every public method has a docstring, its own or that of the method that it overrides."""

import ast
import importlib

import pytest

from tests.sources import PACKAGES, sources


def undocumented_methods(tree):
    """Yields the public classes of a module with their public methods that have no docstring."""
    for cls in tree.body:
        if isinstance(cls, ast.ClassDef) and not cls.name.startswith("_"):
            for node in cls.body:
                is_method = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
                if is_method and not ast.get_docstring(node) and not is_setter(node):
                    yield cls.name, node.name


def is_setter(method):
    """Whether a method sets a property, which has the docstring."""
    return any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in method.decorator_list)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_method_without_docstring_overrides_another_one(package):
    """Ruff demands the docstrings of modules, classes and functions."""
    missing = []
    for module, tree in sources(package).items():
        for cls, method in undocumented_methods(tree):
            bases = getattr(importlib.import_module(module), cls).__mro__[1:]
            if not any(method in vars(base) for base in bases):
                missing.append(f"{module}.{cls}.{method}")
    assert missing == []
