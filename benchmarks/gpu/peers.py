"""Another framework's rounds on the same card, by a script of `benchmarks/peers`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
# The script of each, and which folders show that it can be imported.
SCRIPTS = {
    "pfl-research": ("run_pfl_research.py", ("pfl",)),
    "fedjax": ("run_fedjax.py", ("fedjax",)),
    "pfllib": ("run_pfllib.py", ("PFLlib", "pfllib", "system", "flcore")),
}
ROUNDS = {"pfllib": 2}  # with the first one
MANY = 5
FAR = 0.05  # how much further or less far the weights may have moved


def obstacle(peer: str, folder: Path) -> str | None:
    """Returns why a framework cannot be run; None if it can."""
    script, names = SCRIPTS[peer]
    if not any((folder / name).is_dir() for name in names):
        return f"{folder} has no {names[0]}"
    if not (HERE / "peers" / script).is_file():
        return f"there is no benchmarks/peers/{script}"
    return None


def run(peer: str, folder: Path, task: Path, device: str, limit: float) -> dict[str, Any]:
    """Returns the framework's report, or how it failed."""
    script = HERE / "peers" / SCRIPTS[peer][0]
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # other processes have memory of the card, too
    }
    child = subprocess.Popen(
        [sys.executable, str(script), str(task), device],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"more than {limit:.0f} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    lines = [line for line in output.splitlines() if line.startswith('{"first"')]
    if child.returncode or not lines:
        return {"ok": False, "error": "it failed", "traceback": errors.splitlines()[-6:]}
    return {"ok": True, **json.loads(lines[-1])}


def compared(report: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Returns the line of a report, if its work was that of ours.

    Args:
        report: The framework's.
        ours: How far our weights `moved` in as many rounds, and the number of `parameters`.
    """
    if not report["ok"]:
        return report
    seconds = report["seconds"]
    line = {
        "ms": 1000 * statistics.median(seconds),
        "min_ms": 1000 * min(seconds),
        "rounds": len(seconds),
        "first_s": report["first"],
        "moved": report["moved"],
        "ours_moved": ours["moved"],
        "versions": report["versions"],
    }
    if report.get("peak_bytes"):
        line["gpu_mib"] = report["peak_bytes"] / 2**20
    if report.get("evaluated"):
        line["evaluated_ms"] = 1000 * statistics.median(report["evaluated"])
    if report["parameters"] != ours["parameters"]:
        error = f"{report['parameters']:,} parameters instead of {ours['parameters']:,}"
        return {"ok": False, "error": error}
    apart = abs(report["moved"] - ours["moved"]) / ours["moved"]
    if not apart <= FAR:
        error = f"its weights moved by {report['moved']:.4g}, ours by {ours['moved']:.4g}"
        return {"ok": False, "error": error}
    return {"ok": True, **line}
