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

from benchmarks.gpu.numbers import times

HERE = Path(__file__).parents[1]
SCRIPTS = {
    "pfl-research": "run_pfl_research.py",
    "fedjax": "run_fedjax.py",
    "pfllib": "run_pfllib.py",
}
# The package of each, and where it may lie in the folder of all.
PACKAGES = {
    "pfl-research": ("pfl", ("site-pfl-research", "")),
    "fedjax": ("fedjax", ("site-fedjax", "")),
    "pfllib": ("flcore", ("PFLlib/system", "system", "")),
}
ROUNDS = {"pfllib": 2}  # with the first one
MANY = 5
FAR = 0.05  # how much further or less far the weights may have moved


def place(peer: str, folder: Path) -> Path | None:
    """Returns where in a folder a framework's packages lie; None if they do not."""
    package, places = PACKAGES[peer]
    found = (folder / name for name in places if (folder / name / package).is_dir())
    return next(found, None)


def run(peer: str, folder: Path, task: Path, device: str, limit: float) -> dict[str, Any]:
    """Returns a framework's report, or how it failed."""
    site = place(peer, folder)
    if site is None:
        return {"ok": True, "skipped": f"{folder} has no {PACKAGES[peer][0]}"}
    script = HERE / "peers" / SCRIPTS[peer]
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # other processes have memory of the card, too
        # Float32 without TF32, as our side.
        "NVIDIA_TF32_OVERRIDE": "0",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
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
        last = errors.strip().splitlines()[-6:] or ["it said nothing"]
        return {"ok": False, "error": last[-1], "traceback": last}
    return {"ok": True, **json.loads(lines[-1])}


def compared(report: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Returns the line of a report, if its work was that of ours.

    Args:
        report: The framework's.
        ours: How far our weights `moved` in as many rounds, the number of `parameters`, the
            `samples` of a round and the `work` of one.
    """
    if not report["ok"] or "skipped" in report:
        return report
    line = {
        **times(report["seconds"], ours["samples"], ours.get("work")),
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
