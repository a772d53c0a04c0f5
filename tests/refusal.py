"""The check that a mistake of a user gets one line with the key and the value."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from datamodules import ConfigError


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """Expects a ConfigError whose message is one line with all `parts`."""
    with pytest.raises(ConfigError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert not [part for part in parts if part not in message], message
