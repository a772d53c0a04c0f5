"""A process that is forked from a warm one differs from a fresh one in its speed only."""

import os
import signal
import subprocess
import sys

import pytest

from tests.commands import ROOT, finish
from tests.forks import Popen

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="other systems start fresh processes"),
]
FACTS = """
import atexit, os, subprocess, sys
atexit.register(print, "left")
ours = {name.partition(".")[0] for name in sys.modules} & {"pfl", "models", "datamodules"}
print(os.getppid(), os.getsid(0) == os.getpid(), ours, sys.argv, os.getcwd(), os.environ["FACT"])
sys.stdout.flush()
subprocess.run([sys.executable, "-c", "import os; print(os.getppid())"])
print(os.getpid(), "torch" in sys.modules, __name__)
sys.exit(7)
"""


def test_a_fork_is_a_child_with_nothing_of_ours(tmp_path):
    """Its parent, session, modules, arguments, folder and environment; the same of its child."""
    process = Popen(
        [sys.executable, "-c", FACTS, "word"],
        cwd=tmp_path,
        env={**os.environ, "FACT": "given"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    first, second, third, last = process.communicate(timeout=100)[0].splitlines()
    assert first == f"{os.getpid()} True set() ['-c', 'word'] {tmp_path} given"
    assert (second, third, last) == (str(process.pid), f"{process.pid} True __main__", "left")
    assert process.returncode == 7


def test_a_fork_is_killed_and_its_error_is_printed(tmp_path):
    process = Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        finish("-c", "1 / 0", cwd=tmp_path)
    place = finish("-c", "import pfl; print(*pfl.__path__)", cwd=tmp_path).strip()
    assert place == str(ROOT / "pfl")


MASK = """
import signal, subprocess, sys
from tests import forks
start = forks.REAL

def start_small(command, **options):
    # What forks the others imports NumPy alone: which packages are large makes no difference.
    before = "from tests import forks; forks.LARGE = ('numpy',); "
    return start([*command[:-1], before + command[-1]], **options)

forks.REAL = start_small
if not blocked_before:
    forks._start_server()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
words = "import signal; print(*signal.pthread_sigmask(signal.SIG_BLOCK, []))"
forks.Popen([sys.executable, "-c", words]).wait()
"""


@pytest.mark.parametrize("blocked_before", [True, False])
def test_signals_that_are_blocked_at_a_start_are_not_blocked_in_the_fork(blocked_before):
    """`multiprocessing` blocks SIGINT and SIGTERM while it starts its resource tracker."""
    text = MASK.replace("blocked_before", str(blocked_before))
    made = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True)
    assert (made.returncode, made.stdout, made.stderr) == (0, "\n", "")
