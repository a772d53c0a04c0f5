"""The examples in the docstrings of all public classes of `models`."""

import doctest

import pytest
import torch

import models
from pfl.models.classifier import Classifier

CLASSES = {name: getattr(models, name) for name in models.__all__} | {"Classifier": Classifier}


@pytest.mark.parametrize("name", CLASSES)
def test_the_example_of_every_public_class_runs_as_written(name):
    names = {name: CLASSES[name], "torch": torch}
    (example,) = doctest.DocTestFinder(recurse=False).find(CLASSES[name], name, globs=names)
    assert example.examples
    report: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert results.failed == 0, "".join(report)
    assert results.attempted == len(example.examples)
