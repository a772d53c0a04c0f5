"""What the tests of ``datamodules`` share."""

from contextlib import contextmanager

import pytest

from datamodules import ConfigError


@pytest.fixture(scope="session")
def one_line():
    """Return a context that expects a one-line ConfigError with the given parts in it."""

    @contextmanager
    def expect(*parts: str):
        with pytest.raises(ConfigError) as caught:
            yield
        message = str(caught.value)
        assert "\n" not in message
        assert not [part for part in parts if part not in message], message

    return expect
