"""The examples in docstrings run as they stand there, and every class for users has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import pfl
import pfl.algorithms
import pfl.callbacks

MODULES = [
    module.name
    for module in pkgutil.walk_packages(pfl.__path__, "pfl.")
    # The import of the first is the command line; the others have tests of their own.
    if not module.name.startswith(("pfl.__main__", "pfl.models", "pfl.datamodules"))
]


def examples():
    """All docstrings in `pfl` with an example, by dotted name."""
    finder = doctest.DocTestFinder()
    for name in MODULES:
        yield from (test for test in finder.find(importlib.import_module(name)) if test.examples)


EXAMPLES = {test.name: test for test in examples()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of(name, tmp_path, monkeypatch):
    """Each in an empty folder: some examples write files."""
    monkeypatch.chdir(tmp_path)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(EXAMPLES[name], out=report.append, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_every_class_for_users_has_an_example():
    classes = {
        kind
        for package in (pfl, pfl.algorithms, pfl.callbacks)
        for kind in map(package.__dict__.get, package.__all__)
        if inspect.isclass(kind) and not issubclass(kind, pfl.ConfigError)
    }
    without = {kind.__name__ for kind in classes if ">>>" not in (kind.__doc__ or "")}
    assert without == set()
