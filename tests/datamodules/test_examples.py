"""The examples in the docstrings of all public classes of `datamodules` and `models`."""

import doctest

import numpy as np
import pytest
import torch

import datamodules
import models
from pfl.models.classifier import Classifier

PUBLIC = {n: getattr(p, n) for p in (datamodules, models) for n in p.__all__}
PUBLIC["Classifier"] = Classifier


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_every_public_class_runs_as_written(name):
    names = {name: PUBLIC[name], "np": np, "torch": torch}  # an example imports everything else
    if name == "Pretrained":
        pytest.importorskip("transformers")
    (example,) = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, globs=names)
    assert example.examples
    report: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert results.failed == 0, "".join(report)
    assert results.attempted == len(example.examples)
