"""What the tests over Flower's real processes have in common."""

import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
REAL = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.cli,
    pytest.mark.skipif(
        not (BIN / "flower-superlink").exists(),
        reason="flwr is not installed: make test-more has it",
    ),
]
"""Marks of such tests."""
