"""One process against two: a FedAvg round of the convolutional workloads on a CPU.

    python -m benchmarks.processes > benchmarks/results/processes.md
    python -m benchmarks.processes W3        # only this one

The runs take turns, so that the ratios hold where the machine's speed drifts. The training loss of
the last round shows that they did the same work.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import date
from typing import Any

import torch

from benchmarks.clock import seconds_of, stamps_of
from benchmarks.workloads import BATCH, RATE, WORKLOADS
from pfl.algorithms import FedAvg

SIDES = {  # processes, threads of them all
    "1 process, 1 thread": (1, 1),
    "1 process": (1, None),
    "2 processes": (2, None),
}
REPETITIONS = 3


def measure(key: str, processes: int) -> None:
    """Train, and print as JSON the seconds of each round but the first, and the last loss."""
    workload = WORKLOADS[key]
    method = FedAvg(workload.make(), lr=RATE, local_epochs=workload.epochs, batch_size=BATCH)
    stamps = stamps_of(method, workload.loop(), workload.rounds + 1, processes)
    if method.global_rank == 0:
        print(
            json.dumps({"seconds": seconds_of(stamps), "loss": method.row["train/loss"]}),
            flush=True,
        )


def run(key: str, processes: int, threads: int | None) -> dict[str, Any]:
    """`measure` in processes of its own; the cores are theirs unless `threads` says otherwise."""
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    command = [sys.executable, "-m", "benchmarks.processes", key, str(processes)]
    done = subprocess.run(command, env=env, check=True, text=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    print(f"PyTorch {torch.__version__}, {cores} cores, {platform.machine()}, {date.today()}\n")
    print(f"| ms, median (min - max) | {' | '.join(SIDES)} | ratio to 1 thread, to 1 process |")
    print("|---" * (len(SIDES) + 2) + "|")
    for key in sys.argv[1:] or ["W3", "W4"]:
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for _ in range(REPETITIONS):
            for side, how in SIDES.items():
                found[side].append(run(key, *how))
        ms = {s: [1000 * x for r in runs for x in r["seconds"]] for s, runs in found.items()}
        losses = {s: runs[0]["loss"] for s, runs in found.items()}
        cells = [f"{statistics.median(x):.0f} ({min(x):.0f} - {max(x):.0f})" for x in ms.values()]
        alone, one, two = (statistics.median(x) for x in ms.values())
        title = f"{key} {WORKLOADS[key].title}"
        print(f"| {title} | {' | '.join(cells)} | {alone / two:.2f}, {one / two:.2f} |", flush=True)
        print(
            f"| its last loss | {' | '.join(f'{x:.6f}' for x in losses.values())} | |", flush=True
        )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(sys.argv[1], int(sys.argv[2]))
    else:
        main()
