"""Plants small mistakes in the package, one at a time, and counts those that the tests see.

    python -m tests.mutants fedamp ditto                       # methods
    python -m tests.mutants scores/statistics rounds/cohort    # other files of pfl

Everything is imported and collected once. First the tests run once with the methods as they are,
which records what lines each test executes. Then every mistake has a process of its own, forked
with all of this in memory, which runs the tests that execute the line until one of them fails.
Those that have seen most mistakes for their time come first. The tests of other methods, which use
this one as well, run only for the mistakes that its own tests have missed. The tests of a file that
is no method are those of its folder that name its module or one of its classes, and then all others
of its folder, and all others that name these.
Libraries for this (mutmut, cosmic-ray) import and collect anew for each mistake: here that takes
6 s, a test 0.03 s.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.mutants.mutations import Mutant, mutants, noting, plant
from tests.sources import ROOT

PACKAGE = ROOT / "pfl"
METHODS = PACKAGE / "algorithms"
EQUIVALENT = Path(__file__).with_name("equivalent.yaml")
WITHOUT = ("processes", "cli", "slow")  # marks of tests that take long and concern no formulas
FAILED = 3  # exit status of a process in which this tool itself fails
NOTE = "__note__"  # of a module whose functions note the lines that they execute


def equivalent() -> dict[str, dict[str, str]]:
    """Returns the reasons of mutants that no test can see, by file and mutant."""
    return yaml.safe_load(EQUIVALENT.read_text()) or {}


class Session:
    """The part of a pytest session that runs tests in forked processes.

    Args:
        files: The methods' files.
        jobs: The number of processes.
        most: The most mutants of a file, spread evenly; 0: all.
        limit: The most seconds of computation for the tests of a mutant; one not seen by then
            counts as missed.
        suite: Whether the suite that every method passes runs, too.
    """

    def __init__(self, files: list[Path], jobs: int, most: int, limit: float, suite: bool) -> None:
        self.files, self.jobs, self.most = files, jobs, most
        self.limit, self.suite = limit, suite
        self.failed = False
        self.folder = Path(tempfile.mkdtemp(prefix="mutants"))
        self.lines: dict[str, set[int]] = {}  # of the file, by test
        self.seconds: dict[str, float] = {}  # by test, of computation
        self.catches: Counter[str] = Counter()  # by test

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a failure; only forked processes run tests."""
        self.failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs the tests as the module says, in place of pytest."""
        gc.freeze()  # what processes share stays as it is
        rows = ["| file | planted | tried | caught | missed | cannot be seen | caught |"]
        rows.append("| --- " + "| ---: " * 6 + "|")
        for path in self.files:
            rows.append(row(label(path), *self.count(path, session.items)))
            print(rows[-1], flush=True)
        print("", *rows, sep="\n")
        shutil.rmtree(self.folder)
        return True

    def count(self, path: Path, items: list[pytest.Item]) -> tuple[int, int, int, int]:
        """Plants mistakes in a file: those that exist, are seen, are missed, cannot be seen."""
        tree = ast.parse(path.read_text())
        known = equivalent().get(label(path), {})
        planted = mutants(tree)
        tried = len(planted) if self.most == 0 else min(self.most, len(planted))
        chosen = [planted[k * len(planted) // tried] for k in range(tried)]
        missed = work = [mutant for mutant in chosen if mutant.name not in known]
        closeness = [self.closeness(item, path) for item in items]
        for stage in (2, 1):
            if missed:
                tests = [i for i, near in zip(items, closeness, strict=True) if near == stage]
                missed = self.unseen(path, tree, missed, tests)
        for mutant in missed:
            print(f"missed  {path.name}:{(mutant.lines or [0])[0]}: {mutant.name}", flush=True)
        return len(planted), len(work) - len(missed), len(missed), tried - len(work)

    def unseen(
        self, path: Path, tree: ast.Module, work: list[Mutant], items: list[pytest.Item]
    ) -> list[Mutant]:
        """Returns the mutants that none of these tests sees."""
        self.record(path, items)
        covered = [[i for i in items if near(m, self.lines.get(i.nodeid, set()))] for m in work]
        tasks = (
            lambda job=job: self.seen(path, tree, *job) for job in zip(work, covered, strict=True)
        )
        return [work[place] for place, caught in sorted(self.forked(tasks)) if not caught]

    def closeness(self, item: Any, path: Path) -> int:
        """Returns 2 for a quick test of a file itself, 1 for one of others, too, 0 for others."""
        if any(map(item.get_closest_marker, WITHOUT)):
            return 0
        if METHODS not in path.parents:
            return bool(names_of(path) & words_of(item.path)) + (
                item.path.parent == folder_of(path)
            )
        values = item.callspec.params if hasattr(item, "callspec") else {}
        entry: Any = values.get("method")
        shared = hasattr(entry, "kind")
        if shared and not self.suite:
            return 0
        kinds = entry.kind.__mro__ if shared else vars(item.module).values()
        name = module_name(path)
        classes = {k.__name__ for k in kinds if isinstance(k, type) and k.__module__ == name}
        own = item.path.stem.startswith(f"test_{path.stem}")
        own |= any(isinstance(v, str) and v in vars(loaded(path)) for v in values.values())
        return 2 if own else int(bool(classes))

    def record(self, path: Path, items: list[pytest.Item]) -> None:
        """Finds the lines of a file that each test executes, and the seconds that it takes."""
        self.lines.clear()
        shares = [items[k : k + 20] for k in range(0, len(items), 20)]
        tasks = (
            lambda k=k, share=share: self.traced(path, k, share) for k, share in enumerate(shares)
        )
        for place, _ in self.forked(tasks):
            report = json.loads((self.folder / f"{place}").read_text())
            for test, (taken, executed) in report.items():
                self.seconds[test], self.lines[test] = taken, set(executed)
        for item in items:
            if item.nodeid not in self.lines:
                print(f"left out, since it fails without a mistake: {item.nodeid}")

    def traced(self, path: Path, place: int, items: list[pytest.Item]) -> bool:
        """Runs tests as they are, and writes what lines those execute that pass."""
        executed: set[int] = set()
        plant(module := loaded(path), noting(ast.parse(path.read_text()), NOTE))
        setattr(module, NOTE, executed.add)
        report = {}
        for item, following in pairs(items):
            begin = time.process_time()
            executed.clear()
            self.run(item, following)
            if not self.failed:
                report[item.nodeid] = time.process_time() - begin, sorted(executed)
            self.failed = False
        (self.folder / f"{place}").write_text(json.dumps(report))
        return True

    def seen(self, path: Path, tree: ast.Module, mutant: Mutant, tests: list[pytest.Item]) -> bool:
        """Returns whether a test sees the mistake."""
        mutant.edit()
        try:
            plant(loaded(path), tree)
        except Exception:
            return True  # the module cannot be imported
        tests = sorted(tests, key=self.value, reverse=True)
        for item, following in pairs(tests):
            if time.process_time() > self.limit:
                break
            signal.setitimer(signal.ITIMER_PROF, 5 + 20 * self.seconds[item.nodeid])
            self.run(item, following)
            if self.failed:
                Path(self.folder / f"caught{os.getpid()}").write_text(item.nodeid)
                return True
        return False

    def value(self, item: pytest.Item) -> float:
        """Returns how many mistakes a test has seen for its time."""
        return (self.catches[item.nodeid] + 0.1) / (self.seconds[item.nodeid] + 0.05)

    def run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        """Runs one test; fixtures that the following one shares stay."""
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def forked(self, tasks: Iterable[Callable[[], bool]]) -> Iterator[tuple[int, bool]]:
        """Runs tasks in processes and yields their numbers and results as they end.

        A process that dies, waits for ten minutes, or computes long without an end has seen the
        mistake.
        """
        running: dict[int, int] = {}
        for place, task in enumerate(tasks):
            if len(running) == self.jobs:
                yield self.ended(running)
            process = os.fork()
            if not process:
                try:
                    signal.alarm(600)
                    log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    os.dup2(log, 1)
                    os.dup2(log, 2)
                    os._exit(int(task()))
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(FAILED)
            running[process] = place
        while running:
            yield self.ended(running)

    def ended(self, running: dict[int, int]) -> tuple[int, bool]:
        """Waits for a process."""
        process, status = os.wait()
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == FAILED:
            raise RuntimeError((self.folder / "log").read_text())
        caught = self.folder / f"caught{process}"
        if caught.exists():
            self.catches[caught.read_text()] += 1
        return running.pop(process), status != 0


def near(mutant: Mutant, executed: set[int]) -> bool:
    """Returns whether a test that executes these lines may see a mutant."""
    return bool(executed) and (mutant.lines is None or mutant.lines[0] in executed)


def module_name(path: Path) -> str:
    """Returns the name of a file's module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def loaded(path: Path) -> ModuleType:
    """Returns the module of a file."""
    return importlib.import_module(module_name(path))


@functools.cache
def names_of(path: Path) -> frozenset[str]:
    """Returns the names of a file's module and classes; of a method's functions, too."""
    kinds: Any = ast.ClassDef
    if METHODS in path.parents:
        kinds = ast.FunctionDef | ast.ClassDef
    body = ast.parse(path.read_text()).body
    return frozenset({module_name(path), *(node.name for node in body if isinstance(node, kinds))})


@functools.cache
def words_of(path: Path) -> frozenset[str]:
    """Returns the words of a file, and the modules that it names."""
    return frozenset(re.findall(r"pfl[.\w]+|\w+", path.read_text()))


def folder_of(path: Path) -> Path:
    """Returns the folder of the tests of a file."""
    return ROOT / "tests" / path.parent.relative_to(PACKAGE)


def found(name: str) -> Path:
    """Returns the file of a method, such as "fedamp", or of a path in the package."""
    if "/" in name:
        return PACKAGE / f"{name.removesuffix('.py')}.py"
    return next(METHODS.rglob(f"{name}.py"), METHODS / f"{name}.py")


def label(path: Path) -> str:
    """Returns how the table and `equivalent.yaml` name a file."""
    if METHODS in path.parents:
        return path.stem
    return str(path.relative_to(PACKAGE).with_suffix(""))


def tests_of(files: list[Path], suite: bool) -> list[str]:
    """Returns the test files that name something of these files, and those of their folders."""
    names = frozenset().union(*map(names_of, files))
    folders = [ROOT / "tests" / name for name in ("algorithms", "method")]
    if any(METHODS not in path.parents for path in files):
        folders = [ROOT / "tests"]
    tests = sorted({path for folder in folders for path in folder.rglob("test_*.py")})
    own = {folder_of(path) for path in files}
    return [str(p) for p in tests if suite or p.parent in own or names & words_of(p)]


def pairs(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Yields each test and the one after it."""
    return itertools.zip_longest(items, items[1:])


def row(name: str, planted: int, caught: int, missed: int, known: int) -> str:
    """Returns a row of the table."""
    share = f"{100 * caught / max(1, caught + missed):.1f} %"
    numbers = [planted, caught + missed + known, caught, missed, known, share]
    return "| " + " | ".join(map(str, [name, *numbers])) + " |"


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    what = "methods, or files such as scores/statistics; all methods where none"
    parser.add_argument("files", nargs="*", metavar="FILE", help=what)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--most", type=int, default=0, help="mutants of a file; 0: all")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of tests for a mutant")
    parser.add_argument("--suite", action="store_true", help="run the suite of all methods, too")
    given = parser.parse_args()
    names = given.files or [p.stem for p in METHODS.rglob("*.py") if p.stem != "__init__"]
    files = [found(name) for name in names]
    session = Session(files, given.jobs, given.most, given.limit, given.suite)
    options = ["-qq", "-s", "--no-header", "--no-summary", "-p", "no:cacheprovider"]
    tests = tests_of(files, given.suite)
    sys.exit(pytest.main([*options, "-o", "tmp_path_retention_policy=none", *tests], [session]))


if __name__ == "__main__":
    main()
