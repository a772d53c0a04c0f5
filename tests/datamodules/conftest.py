"""Fixtures of the tests of `datamodules`."""

import pytest

from tests.refusal import refused


@pytest.fixture(scope="session")
def one_line():
    """Returns a context that expects a one-line ConfigError with the given parts in it."""
    return refused
