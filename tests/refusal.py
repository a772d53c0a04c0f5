"""A user's mistake must be answered with one line that names what is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from datamodules import ConfigError


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """A ConfigError of one line in which all `parts` stand."""
    with pytest.raises(ConfigError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert not [part for part in parts if part not in message], message
