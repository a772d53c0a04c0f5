"""The private names of other packages that `pfl/_private.py` uses still exist."""

import pytest
from lightning.pytorch.cli import LightningCLI

from pfl._private import CommandLine

STEPS = [name for name in vars(CommandLine) if name.startswith("_") and not name.endswith("__")]


@pytest.mark.parametrize("name", STEPS)
def test_lightnings_command_line_has_the_steps_that_ours_replaces(name):
    assert name in vars(LightningCLI)
    assert name in LightningCLI.__init__.__code__.co_names  # so the replacement is called
