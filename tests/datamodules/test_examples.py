"""The examples in the docstrings of all public classes of `datamodules`."""

import doctest

import numpy as np
import pytest
import torch

import datamodules


@pytest.mark.parametrize("name", datamodules.__all__)
def test_the_example_of_every_public_class_runs_as_written(name):
    public = getattr(datamodules, name)
    names = {name: public, "np": np, "torch": torch}  # an example imports everything else
    (example,) = doctest.DocTestFinder(recurse=False).find(public, name, globs=names)
    assert example.examples
    report: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert results.failed == 0, "".join(report)
    assert results.attempted == len(example.examples)
