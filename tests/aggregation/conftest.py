"""Fixtures of these tests."""

from functools import partial

import pytest

from tests.problems import run


@pytest.fixture
def fit(tmp_path):
    """`tests.problems.run`, with a folder of its own."""
    return partial(run, root=tmp_path)
