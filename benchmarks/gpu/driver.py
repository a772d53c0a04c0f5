"""Runs the cases in order and keeps every result: this process never touches the GPU."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import page, peers
from benchmarks.gpu.cases import Case, all_cases, chosen
from benchmarks.gpu.process import Ended, NotReady, Process

ROOT = Path(__file__).parents[2]
RESULTS = "cases.jsonl"
# PyTorch's profiler listens on after its first use; to stop and start again breaks CUDA graphs.
ENVIRONMENT = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
# Bit for bit the same matrix products in each run, if asked for before the first one.
OF_CHECKS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
Start = Callable[[str], Process]


@dataclass
class Driver:
    """Runs cases that have no result yet.

    Attributes:
        folder: Of cases.jsonl, logs and what the sides share.
        seconds: After which no further case begins.
        start: Starts the worker of a name.
        device: Where the other frameworks run.
        peers: Where they lie; None: they are not run.
        workers: The processes by kind.
        trained: The shapes and precisions that our side has trained in this run.
    """

    folder: Path
    seconds: float
    start: Start
    device: str = "cpu"
    peers: Path | None = None
    workers: dict[str, Process] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)

    def run(self, cases: Sequence[Case]) -> int:
        """Runs cases in order; returns how many were left for want of time.

        Raises:
            NotReady: A worker cannot begin, so that no case has a line.
        """
        begun = time.monotonic()
        end_line(self.folder / RESULTS)
        done = {line["case"] for line in read(self.folder)}
        left = [case for case in cases if case.name not in done]
        try:
            for kind in dict.fromkeys(case.worker for case in left):  # they begin side by side
                self._worker(kind)
            for number, case in enumerate(left):
                if time.monotonic() - begun > self.seconds:
                    return len(left) - number
                self._do(case, begun)
                if case.worker not in {later.worker for later in left[number + 1 :]}:
                    self._end(case.worker)
        finally:
            for kind in list(self.workers):
                self._end(kind)
        return 0

    def _do(self, case: Case, begun: float) -> None:
        """Runs a case, whatever happens in it, and appends its line."""
        at = time.monotonic()
        try:
            self._make_weights(case)
            if case.worker == "peers":
                found = self._peer(case)
            else:
                found = self._ask(case.worker, case.job, case.limit)
        except Ended as error:
            found = {"ok": False, "error": str(error)}
        now = time.monotonic()
        line = {"case": case.name, **found, "seconds": now - at, "at": now - begun}
        with (self.folder / RESULTS).open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
        print(told(line), flush=True)

    def _make_weights(self, case: Case) -> None:
        """Has our side train a shape again whose weights were left on another machine.

        Our weights are what the other sides are compared with. A shape that our side has trained
        in this run is not trained again, since it would fail again.
        """
        if "shape" not in case.job:
            return
        precision = case.job.get("precision", "fp32")
        name = f"{case.job['shape']}-{precision}"
        if case.worker == "ours":
            if case.name.endswith("/ours"):
                self.trained.add(name)
            return
        if name in self.trained:
            return
        self.trained.add(name)
        if not any((self.folder / "scratch" / name).glob("*.pt")):
            job = {"do": "ours", "shape": case.job["shape"], "precision": precision}
            self._ask("ours", {**job, "engine": "auto"}, case.limit)

    def _peer(self, case: Case) -> dict[str, Any]:
        peer = case.job["peer"]
        assert self.peers is not None
        shape = case.job["shape"]
        task = self.folder / "scratch" / f"{shape}.npz"
        rounds = peers.ROUNDS.get(peer, peers.MANY)
        job = {"do": "task", "shape": shape, "rounds": rounds, "file": str(task)}
        ours = self._ask("ours", job, case.limit)
        if not ours["ok"]:
            return ours
        report = peers.run(peer, self.peers, task, self.device, case.limit)
        task.unlink()
        return peers.compared(report, ours)

    def _ask(self, kind: str, job: dict[str, Any], limit: float) -> dict[str, Any]:
        worker = self._worker(kind)
        assert worker is not None
        return worker.ask(job, limit)

    def _worker(self, kind: str) -> Process | None:
        """Returns the process of a kind, a new one where the last one has ended."""
        if kind == "peers":
            return None
        if kind not in self.workers or not self.workers[kind].alive:
            self._end(kind)
            self.workers[kind] = self.start(kind)
        return self.workers[kind]

    def _end(self, kind: str) -> None:
        if kind in self.workers:
            self.workers.pop(kind).end()


def end_line(path: Path) -> None:
    """Ends the last line of a file, which a killed process may have cut off."""
    if path.is_file() and not path.read_text().endswith("\n"):
        with path.open("a") as file:
            file.write("\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of a folder's results; a line that was cut off is left out."""
    path = folder / RESULTS
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def told(line: dict[str, Any]) -> str:
    """Returns a result in a line of text."""
    verdict = "ok"
    if not line["ok"]:
        verdict = "FAILED"
    elif "skipped" in line:
        verdict = "skipped"
    words = [f"{line['at']:6.1f} s  {verdict:7} {line['case']}"]
    if "ms" in line:
        words.append(f"{line['ms']:.2f} ms a round")
    for name in ("distance", "busy", "launches"):
        if line.get(name) is not None:
            words.append(f"{name} {line[name]:.3g}")
    for name in ("engine", "skipped", "error", "says", "differ", "traceback"):
        if line.get(name):
            words.append(f"{name}: {line[name]}")
    return "  ".join(words)


def starter(device: str, folder: Path, tiny: bool) -> Start:
    """Returns what starts a worker."""
    size = "full"
    seconds = "1.0"
    if tiny:
        size = "tiny"
        seconds = "0.01"
    scratch = folder / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)

    def start(kind: str) -> Process:
        command = [sys.executable, "-m", "benchmarks.gpu.worker"]
        command += [device, str(scratch), seconds, size]
        environment = dict(ENVIRONMENT)
        if kind == "checks":
            environment |= OF_CHECKS
        return Process(command, folder / f"{kind}.log", environment, ROOT)

    return start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / ".cache" / "gpu")
    parser.add_argument("--seconds", type=float, default=420, help="after which no case begins")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="e.g. check W1/fp32")
    parser.add_argument("--peers", type=Path, help="folder of other frameworks' packages")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a rehearsal")
    parser.add_argument("--page", action="store_true", help="only print the tables")
    parser.add_argument("--list", action="store_true", help="only print the names of the cases")
    args = parser.parse_args()
    cases = chosen(all_cases(args.peers is not None), args.only)
    if not cases:
        parser.error(f"--only: no case matches {' '.join(args.only)}; --list prints their names")
    if args.list:
        print("\n".join(case.name for case in cases))
        return
    out = args.out.resolve()
    if not args.page:
        out.mkdir(parents=True, exist_ok=True)
        start = starter(args.device, out, args.tiny)
        driver = Driver(out, args.seconds, start, args.device, args.peers and args.peers.resolve())
        try:
            left = driver.run(cases)
        except NotReady as error:
            sys.exit(f"no case can be run: {error}")
        if left:
            print(f"{left} cases were left; the same command goes on with them", flush=True)
    print(page.markdown(read(out)))


if __name__ == "__main__":
    main()
