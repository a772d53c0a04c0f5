"""Runs that a fault ends, at a change of a file or at a signal, go on to the result of a whole run.

`make chaos` tries many more of them (`tests/faults/chaos.py`).
"""

import random

import pytest

from tests.faults.injected import REFUSED, Fault, differences, outcome, run, strike_and_resume

pytestmark = pytest.mark.slow
# Sparse states; a table and a figure of its own; two states of every client, in files.
CASES = {"FedSLR, S+LR": None, "FedACS": None, "SCAFFOLD": 0.0}
# Lightning ends a round after SIGTERM with a SystemExit; outside of rounds Python has its way.
STATUS = {"kill": {-9}, "half": {-9}, "stop": {-15, 0}, "full": {REFUSED}}


@pytest.fixture(scope="module", params=CASES)
def whole(request, tmp_path_factory):
    """A method, its memory for states, what its whole run leaves behind, and the file changes."""
    method = request.param
    root = tmp_path_factory.mktemp(method)
    assert run(root, method, memory=CASES[method]) == 0
    return method, CASES[method], outcome(root / "run"), int((root / "changes").read_text())


@pytest.mark.parametrize("kind", STATUS)
def test_a_run_that_a_fault_ended_continues(whole, kind, tmp_path):
    """Two faults, one of them in the last phase: in the last sixth of all changes of files."""
    method, memory, expected, changes = whole
    rng = random.Random(f"{method} {kind}")
    late = changes * 5 // 6
    faults = [Fault(kind, rng.randint(1, late)), Fault(kind, rng.randint(late, changes))]
    for number, fault in enumerate(faults):
        root = tmp_path / str(number)
        root.mkdir()
        statuses = strike_and_resume(root, method, [fault], memory)
        assert statuses[0] in STATUS[kind] and statuses[1] == 0, fault
        assert differences(outcome(root / "run"), expected) == [], fault


def test_faults_in_a_row(whole, tmp_path):
    method, memory, expected, _ = whole
    faults = [Fault("kill", 13), Fault("full", 9), Fault("half", 7), Fault("kill", 3)]
    assert strike_and_resume(tmp_path, method, faults, memory)[-1] == 0
    assert differences(outcome(tmp_path / "run"), expected) == []
