"""The same rounds of FedAvg by this framework, by hand, and by other frameworks, as a table.

    python -m benchmarks.compare                   # our side -> results/rounds.md
    python -m benchmarks.compare --peers           # and the others -> results/peers.md
    python -m benchmarks.compare --peers W1 W3     # only these workloads

Every run is a process of its own, in the environment of its framework (made under .cache/, which
needs uv and PyPI), on the same arrays and the same two cores. Frameworks take turns, so that a
change of the machine's speed hits all of them. The table is written anew after every turn.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.peers.task import Report
from benchmarks.table import markdown
from benchmarks.workloads import WORKLOADS

HERE = Path(__file__).parent
CACHE = HERE / ".cache"
CORES = sorted(os.sched_getaffinity(0))[:2]
LIMIT = 400  # seconds of one run
# With the first, whoever asks in every step whether there is a GPU takes twice as long on W1.
SET_BY_LIGHTNING = ("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR")


@dataclass(frozen=True)
class Side:
    """One row of the table: how a framework is run.

    Args:
        name: In the table.
        program: File and arguments; TASK stands for the file of the task.
        peer: Name of its environment; "" is ours.
        processes: Among which the cores are divided.
        flags: Environment variables besides.
    """

    name: str
    program: str
    peer: str = ""
    processes: int = 1
    flags: tuple[tuple[str, str], ...] = ()

    def command(self, task: Path) -> list[str]:
        program, *arguments = self.program.replace("TASK", str(task)).split()
        if not self.peer:
            return [sys.executable, "-m", program, *arguments]
        start = [str(CACHE / f"env-{self.peer}" / "bin" / "python")]
        if self.peer == "pfl_research" and self.processes > 1:
            start += ["-m", "torch.distributed.run", f"--nproc-per-node={self.processes}"]
        return [*start, str(HERE / program), *arguments]

    def environment(self) -> dict[str, str]:
        threads = max(1, len(CORES) // self.processes)
        started_with = {k: v for k, v in os.environ.items() if k not in SET_BY_LIGHTNING}
        return {**started_with, "OMP_NUM_THREADS": str(threads), **dict(self.flags)}


OURS = [
    Side("this framework", "benchmarks.rounds TASK"),
    Side("this framework, 2 processes", "benchmarks.rounds TASK 2", processes=2),
    Side("PyTorch by hand", "benchmarks.by_hand plain TASK"),
    Side("PyTorch by hand, flat parameters", "benchmarks.by_hand flat TASK"),
]
QUIET = (("FLWR_TELEMETRY_ENABLED", "0"), ("RAY_USAGE_STATS_ENABLED", "0"))
PEERS = [
    # The last JAX before XLA's new runtime takes a third of the time on W1, and more on W3. With a
    # newer one the old runtime is still faster, on W1 to W4.
    Side("FedJAX, JAX 0.4.30", "peers/run_fedjax.py TASK", "fedjax_older"),
    Side(
        "FedJAX, JAX 0.5.3",
        "peers/run_fedjax.py TASK",
        "fedjax",
        flags=(("XLA_FLAGS", "--xla_cpu_use_thunk_runtime=false"),),
    ),
    Side("pfl-research", "peers/run_pfl_research.py TASK", "pfl_research"),
    Side(
        "pfl-research, 2 processes", "peers/run_pfl_research.py TASK", "pfl_research", processes=2
    ),
    Side("FedLab", "peers/run_fedlab.py TASK", "fedlab"),
    Side("Flower, 1 actor", "peers/run_flower.py TASK 1", "flower", flags=QUIET),
    Side("Flower, 2 actors", "peers/run_flower.py TASK 2", "flower", processes=2, flags=QUIET),
]


def install(peer: str) -> str:
    """Make a peer's environment; returns what went wrong, or nothing."""
    folder, pins = CACHE / f"env-{peer}", HERE / "peers" / f"{peer}.txt"
    into = ["--python", str(folder / "bin/python")]
    steps = [
        ["uv", "venv", "--quiet", "--allow-existing", "--python", "3.11", str(folder)],
        ["uv", "pip", "install", "--quiet", *into, "-r", str(pins)],
    ]
    if not shutil.which("uv"):
        return "failed: uv is not installed"
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            return f"failed: {last_line(done.stderr)}"
    return ""


def run(side: Side, task: Path, parameters: int) -> Report | str:
    """A process's report, or what went wrong in a line."""
    process = subprocess.Popen(
        side.command(task),
        env=side.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its own processes can be ended with it
    )
    try:
        output, errors = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"failed: more than {LIMIT} s"
    finally:
        end(process)
    lines = [line for line in output.splitlines() if line.startswith('{"first"')]
    if process.returncode or not lines:
        return f"failed: {last_line(errors)}"
    report = Report(**json.loads(lines[-1]))
    if report.parameters != parameters:
        return f"failed: {report.parameters:,} parameters instead of {parameters:,}"
    return report


def end(process: subprocess.Popen[str]) -> None:
    """End what is left of a run, its own processes included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(text: str) -> str:
    """The last line that tells of an error, or else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if "Error" in line] or lines or ["it said nothing"]
    return lines[-1][:150].replace("|", "/")


def machine() -> str:
    """In words: processor, cores, memory, date, and how busy it was."""
    names = [
        x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")
    ]
    name = names[0].partition(":")[2].strip() if names else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{name}, {len(CORES)} of {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, "
        f"{datetime.now():%Y-%m-%d}; load {os.getloadavg()[0]:.1f} when it began."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", metavar="W", help=", ".join(WORKLOADS))
    parser.add_argument("--peers", action="store_true", help="also the other frameworks")
    parser.add_argument("--rounds", type=int, help="timed rounds of a run, e.g. 1 for a trial")
    parser.add_argument("--repetitions", type=int, help="runs of each framework")
    parser.add_argument("--output", type=Path, help="file of the table")
    args = parser.parse_args()
    if unknown := set(args.workloads) - set(WORKLOADS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(WORKLOADS)}")
    keys = args.workloads or list(WORKLOADS)
    os.sched_setaffinity(0, CORES)  # whatever is started from here on has no more
    CACHE.mkdir(exist_ok=True)
    broken, tasks, heading = {}, {}, machine()
    for peer in sorted({side.peer for side in PEERS} if args.peers else ()):
        broken[peer] = install(peer)
    for key in keys:
        task = WORKLOADS[key].task(key, args.rounds or WORKLOADS[key].rounds)
        tasks[key] = (CACHE / f"{key}.npz", task.parameters)
        task.save(tasks[key][0])
        del task
    results: dict[tuple[str, str], list[Report | str]] = {}
    sides = OURS + (PEERS if args.peers else [])
    output = args.output or HERE / "results" / ("peers.md" if args.peers else "rounds.md")
    repetitions = {k: args.repetitions or WORKLOADS[k].repetitions for k in keys}
    for turn in range(max(repetitions.values())):
        for key in [k for k in keys if turn < repetitions[k]]:
            for side in sides:
                result = broken.get(side.peer) or run(side, *tasks[key])
                results.setdefault((side.name, key), []).append(result)
                print(f"{turn + 1} {key} {side.name}: {result}", flush=True)
            others = [side.name for side in sides if side.peer]
            output.write_text(
                markdown(keys, [side.name for side in sides], others, results, heading)
            )


if __name__ == "__main__":
    main()
