"""Plants small mistakes in the methods, one at a time, and counts those that the tests see.

    python -m tests.mutants fedamp ditto

Everything is imported and collected once. First the tests run once with the methods as they are,
which records what lines each test executes. Then every mistake has a process of its own, forked
with all of this in memory, which runs the tests that execute the line, the fastest ones first,
until one of them fails. Libraries for this (mutmut, cosmic-ray) import and collect anew for each
mistake: here that takes 6 s, and the tests of a line less than one.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.mutants.mutations import Mutant, mutants, plant
from tests.sources import ROOT

METHODS = ROOT / "pfl" / "algorithms"
EQUIVALENT = Path(__file__).with_name("equivalent.yaml")
WITHOUT = ("processes", "cli")  # marks of tests that take long and concern no method's formulas


def equivalent() -> dict[str, dict[str, str]]:
    """Returns the reasons of mutants that no test can see, by file and mutant."""
    return yaml.safe_load(EQUIVALENT.read_text()) or {}


class Session:
    """The part of a pytest session that runs tests in forked processes.

    Args:
        files: The methods' files.
        jobs: The number of processes.
        most: The most mutants of a file, spread evenly; 0: all.
    """

    def __init__(self, files: list[Path], jobs: int, most: int) -> None:
        self.files, self.jobs, self.most = files, jobs, most
        self.failed = False
        self.folder = Path(tempfile.mkdtemp(prefix="mutants"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a failure; only forked processes run tests."""
        self.failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs the tests as the module says, in place of pytest."""
        items = [item for item in session.items if self.concerns(item)]
        lines, seconds = self.recorded(items)
        work, results = [], []
        for path in self.files:
            tree = ast.parse(path.read_text())
            known = equivalent().get(path.stem, {})
            planted = mutants(tree)
            tests = sorted((i for i in items if path.stem in lines[i.nodeid]), key=by(seconds))
            count = len(planted) if self.most == 0 else min(self.most, len(planted))
            for k in range(count):
                mutant = planted[k * len(planted) // count]
                if mutant.name in known:
                    results.append((path.stem, "equivalent", mutant))
                else:
                    work.append((path, tree, mutant, covering(mutant, path.stem, tests, lines)))
        tasks = (lambda job=job: self.seen(*job) for job in work)
        for place, caught in self.forked(tasks):
            path, _, mutant, tests = work[place]
            outcome = "caught" if caught else "missed" if tests else "missed (in no test)"
            results.append((path.stem, outcome, mutant))
            if not caught:
                print(
                    f"{outcome}  {path.name}:{(mutant.lines or ' ')[0]}: {mutant.name}", flush=True
                )
        print_table(results)
        shutil.rmtree(self.folder)
        return True

    def concerns(self, item: Any) -> bool:
        """Returns whether a test is quick and has one of the methods in its entry or its module."""
        if any(map(item.get_closest_marker, WITHOUT)):
            return False
        entry: Any = getattr(item, "callspec", None) and item.callspec.params.get("method")
        present = entry.kind.__mro__ if hasattr(entry, "kind") else vars(item.module).values()
        names = {f"pfl.algorithms.{path.stem}" for path in self.files}
        return any(isinstance(kind, type) and kind.__module__ in names for kind in present)

    def recorded(
        self, items: list[pytest.Item]
    ) -> tuple[dict[str, dict[str, set[int]]], dict[str, float]]:
        """Returns the lines that each test executes, by method, and the seconds that it takes."""
        lines: dict[str, dict[str, set[int]]] = defaultdict(dict)
        seconds: dict[str, float] = {}
        shares = [items[k :: 4 * self.jobs] for k in range(4 * self.jobs)]
        tasks = (lambda k=k, share=share: self.traced(k, share) for k, share in enumerate(shares))
        for place, _ in self.forked(tasks):
            report = json.loads((self.folder / f"{place}").read_text())
            for test, (taken, executed) in report.items():
                seconds[test] = taken
                lines[test] = {name: set(numbers) for name, numbers in executed.items()}
        for item in items:
            if item.nodeid not in seconds:
                print(f"left out, since it fails without a mistake: {item.nodeid}")
        return lines, seconds

    def traced(self, place: int, items: list[pytest.Item]) -> bool:
        """Runs tests as they are, and writes what lines those execute that pass."""
        executed: dict[str, set[int]] = defaultdict(set)
        names = {str(path): path.stem for path in METHODS.glob("*.py")}

        def local(frame: Any, event: str, argument: Any) -> Any:
            executed[names[frame.f_code.co_filename]].add(frame.f_lineno)
            return local

        def entered(frame: Any, event: str, argument: Any) -> Any:
            return local(frame, event, argument) if frame.f_code.co_filename in names else None

        report = {}
        for item, following in pairs(items):
            begin = time.perf_counter()
            executed.clear()
            sys.settrace(entered)
            self.run(item, following)
            sys.settrace(None)
            found = {name: sorted(numbers) for name, numbers in executed.items()}
            if not self.failed:
                report[item.nodeid] = time.perf_counter() - begin, found
            self.failed = False
        (self.folder / f"{place}").write_text(json.dumps(report))
        return True

    def seen(self, path: Path, tree: ast.Module, mutant: Mutant, tests: list[pytest.Item]) -> bool:
        """Returns whether a test sees the mistake."""
        mutant.edit()
        try:
            plant(importlib.import_module(f"pfl.algorithms.{path.stem}"), tree)
        except Exception:
            return True  # the module cannot be imported
        for item, following in pairs(tests):
            self.run(item, following)
            if self.failed:
                return True
        return False

    def run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        """Runs one test; fixtures that the following one shares stay."""
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def forked(self, tasks: Iterable[Callable[[], bool]]) -> Iterator[tuple[int, bool]]:
        """Runs tasks in processes and yields their numbers and results as they end.

        A process that takes longer than two minutes, or dies, has seen the mistake.
        """
        running: dict[int, int] = {}
        for place, task in enumerate(tasks):
            if len(running) == self.jobs:
                yield self.ended(running)
            process = os.fork()
            if not process:
                try:
                    signal.alarm(120)
                    for stream in (1, 2):
                        os.dup2(
                            os.open(self.folder / f"log{place}", os.O_WRONLY | os.O_CREAT), stream
                        )
                    os._exit(int(task()))
                finally:
                    os._exit(1)
            running[process] = place
        while running:
            yield self.ended(running)

    def ended(self, running: dict[int, int]) -> tuple[int, bool]:
        """Waits for a process."""
        process, status = os.wait()
        return running.pop(process), status != 0


def pairs(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Yields each test and the one after it."""
    return zip(items, [*items[1:], None], strict=True)


def by(seconds: dict[str, float]) -> Callable[[pytest.Item], float]:
    """Returns the order of tests by their time."""
    return lambda item: seconds[item.nodeid]


def covering(
    mutant: Mutant, name: str, tests: list[pytest.Item], lines: dict[str, dict[str, set[int]]]
) -> list[pytest.Item]:
    """Returns the tests that execute a line of the mutant; all where the module itself does."""
    if mutant.lines is None:
        return tests
    own = set(range(mutant.lines[0], mutant.lines[1] + 1))
    return [test for test in tests if own & lines[test.nodeid][name]]


def print_table(results: list[tuple[str, str, Mutant]]) -> None:
    """Prints the counts by file."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, outcome, _ in results:
        counts[name][outcome.split()[0]] += 1
    print("\n| file | planted | caught | missed | equivalent | caught of those that can be |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, count in sorted(counts.items()):
        caught, missed = count["caught"], count["missed"]
        share = f"{100 * caught / max(1, caught + missed):.1f} %"
        row = [name, count.total(), caught, missed, count["equivalent"], share]
        print("| " + " | ".join(map(str, row)) + " |")


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("methods", nargs="*", help="files in pfl/algorithms; all where none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--most", type=int, default=0, help="mutants of a file; 0: all")
    given = parser.parse_args()
    names = given.methods or [p.stem for p in METHODS.glob("*.py") if p.stem != "__init__"]
    files = [METHODS / f"{name}.py" for name in sorted(names)]
    session = Session(files, given.jobs, given.most)
    options = ["-qq", "-s", "--no-header", "--no-summary", "-p", "no:cacheprovider"]
    sys.exit(
        pytest.main(
            [*options, "-o", "tmp_path_retention_policy=none", str(ROOT / "tests" / "algorithms")],
            [session],
        )
    )


if __name__ == "__main__":
    main()
