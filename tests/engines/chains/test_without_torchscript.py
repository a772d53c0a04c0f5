"""The engines without TorchScript, which PyTorch may remove: the same values, in plain Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = ["test_oracle", "chains/test_choice", "chains/test_chain", "test_threads"]
CHOSEN = [
    "-m",
    "not slow",
    "-k",
    "test_chain or test_choice or test_threads or auto",
]  # what the kernels run
PYTEST = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *CHOSEN]


@pytest.mark.slow
@pytest.mark.processes
def test_engines_give_the_same_values_without_torchscript():
    """PYTORCH_JIT is read when torch is imported, hence another process."""
    done = subprocess.run(
        [*PYTEST, *(f"tests/engines/{name}.py" for name in FILES)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTORCH_JIT": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
