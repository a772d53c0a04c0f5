"""Ends runs at random moments, resumes them, and compares all that they leave with whole runs.

    python -m tests.faults.chaos --minutes 10 --seed 0

Every trial takes another method, its client states in memory or in files, and one of `KINDS`, or a
command of `tests/faults/experiments.py` and one of its faults. The table that is printed at the end
counts the trials that were tried, held and failed. A trial that failed is repeated with its seed
and number: `--only`.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from tests.algorithms.methods import METHODS
from tests.faults import experiments
from tests.faults.injected import REFUSED, Fault, differences, newest, outcome, run
from tests.faults.several import KILLED, end_one_of_two

TIERS = {"memory": None, "files": 0.0}
AT_A_CHANGE = {  # what strikes at a change of a file, and the exit statuses that it may lead to
    "kill": (-9,),
    "half": (-9,),
    "stop": (-15, 0),
    "full": (REFUSED,),
}
KINDS = {
    "kill": "SIGKILL before the n-th change of a file",
    "half": "SIGKILL within the n-th change of a file",
    "stop": "SIGTERM at the n-th change of a file",
    "full": "a full disk from the n-th change of a file on",
    "time": "SIGKILL at a random time",
    "flip": "a flipped bit in last.ckpt",
    "row": "three kills",
}
PROCESSES = 40  # every 40th trial ends one of two processes
COMMANDS = 4  # every fourth trial ends a command that makes or reads several runs


class Failed(Exception):
    """A run that did not end as it should, or did not leave what a whole run leaves."""


@cache
def whole(method: str, tier: str) -> tuple[dict[str, Any], int, float]:
    """What a whole run leaves behind, its changes of files, and its seconds."""
    root, begun = Path(tempfile.mkdtemp(prefix="chaos-")), time.monotonic()
    try:
        status = run(root, method, memory=TIERS[tier])
        if status != 0:
            raise Failed(f"the whole run ended with {status}")
        changes = int((root / "changes").read_text())
        return outcome(root / "run"), changes, time.monotonic() - begun
    finally:
        shutil.rmtree(root)


def struck(root: Path, method: str, tier: str, kind: str, rng: random.Random) -> str:
    """Lets a fault strike once; returns what it was, in words."""
    memory, (_, changes, seconds) = TIERS[tier], whole(method, tier)
    allowed: tuple[int, ...] = (-9, 0)
    if kind == "time":
        what = f"{rng.uniform(0, seconds):.3f}"
        status = run(root, method, memory=memory, kill_after=float(what))
    else:
        what = str(rng.randint(1, changes))
        status = run(root, method, Fault(kind, int(what)), memory)
        # A resumed run has fewer changes, and may end before the fault strikes.
        allowed = (*AT_A_CHANGE[kind], 0)
    if status not in allowed:
        raise Failed(f"{kind} {what}: status {status}")
    return f"{kind} {what}"


def flipped(root: Path, method: str, tier: str, rng: random.Random) -> str:
    """Flips a bit in the last checkpoint, and goes on from the one before if it is refused."""
    memory, (_, changes, _) = TIERS[tier], whole(method, tier)
    run(root, method, Fault("kill", rng.randint(changes * 2 // 3, changes)), memory)
    path = root / "run" / "checkpoints" / "last.ckpt"
    before = path.with_name("previous.ckpt")
    if not (path.is_file() and before.is_file()):
        return "flip: there were no two checkpoints yet"
    content, place = bytearray(path.read_bytes()), rng.randrange(8 * path.stat().st_size)
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)
    status = run(root, method, memory=memory)
    if status == REFUSED:
        path.unlink()
    elif status != 0:
        raise Failed(f"flip {place}: status {status}")
    return f"flip {place}: {status}"


def trial(method: str, tier: str, kind: str, seed: str) -> str:
    """One trial; returns what was done.

    Raises:
        Failed: It did not hold.
    """
    rng, root = random.Random(seed), Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        if kind == "flip":
            what = flipped(root, method, tier, rng)
        else:
            kinds = ["kill", "half", "time"] if kind == "row" else [kind]
            what = ", ".join(struck(root, method, tier, one, rng) for one in kinds)
        goes_on = newest(root / "run") is not None
        status = run(root, method, memory=TIERS[tier])
        if status != 0:
            raise Failed(f"{what}; resumed ({goes_on}): status {status}")
        if names := differences(outcome(root / "run"), whole(method, tier)[0]):
            raise Failed(f"{what}; resumed ({goes_on}): other {', '.join(names)}")
        return what
    finally:
        shutil.rmtree(root)


def main() -> int:
    """Runs trials until the time is up; the status is 1 if one failed."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of a trial, to repeat it")
    given = parser.parse_args()
    tried, held = Counter[str](), Counter[str]()
    methods, failures = set(), []
    pairs = list(itertools.product(METHODS, TIERS))
    random.Random(given.seed).shuffle(pairs)
    end = time.monotonic() + 60 * given.minutes
    for number in itertools.count() if given.only is None else [given.only]:
        if given.only is None and time.monotonic() > end:
            break
        method, tier = pairs[number % len(pairs)]
        seed, kind = f"{given.seed} {number}", list(KINDS)[number % len(KINDS)]
        several = number % PROCESSES == PROCESSES - 1
        of_commands = not several and number % COMMANDS == COMMANDS - 1
        rng = random.Random(seed)
        command, fault = experiments.drawn(rng)
        if several:
            kind, tier, method = KILLED, "memory", "SCAFFOLD"
        elif of_commands:
            kind = experiments.KINDS[command, fault]
            tier, method = fault, command
        else:
            methods.add((method, tier))
        tried[kind] += 1
        try:
            if several:
                end_one_of_two(rng)
            elif of_commands:
                experiments.end_a_command(command, fault, rng)
            else:
                trial(method, tier, kind, seed)
            held[kind] += 1
        except Exception as error:  # whatever went wrong, the other trials go on
            text = error if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
            failures.append(f"{number}: {method}, {tier}, {kind}: {text}")
            print(f"failed {failures[-1]}", file=sys.stderr, flush=True)
    print(
        f"\nSeed {given.seed}, {given.minutes:g} minutes, {len(methods)} of {len(pairs)} pairs of"
    )
    print("method and tier.\n\n| fault | tried | held | failed |\n|---|---|---|---|")
    for kind in tried:
        name = KINDS.get(kind, kind)
        print(f"| {name} | {tried[kind]} | {held[kind]} | {tried[kind] - held[kind]} |")
    print("\n".join(["", *failures]))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
