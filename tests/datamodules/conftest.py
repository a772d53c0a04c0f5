"""What the tests of ``datamodules`` share."""

import pytest

from tests.refusal import refused


@pytest.fixture(scope="session")
def one_line():
    """Return a context that expects a one-line ConfigError with the given parts in it."""

    return refused
