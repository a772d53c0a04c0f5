"""Repeats runs drawn at random from the data of the results' pages, and compares the numbers.

    python -m benchmarks.repeat --runs 2 --seed 1 results/fedclup-logit fedpd-figure2
    python -m benchmarks.repeat                           # two runs of every file of docs/data
    python -m benchmarks.repeat --nightly --seconds 300   # one run of every file, to its last round

A run is repeated up to the third round that its file has; where one round is the whole file, up to
that one. The rows say how many numbers were compared, and their largest relative difference. The
files have seven digits. Runs of more than `--seconds` are given up.

At night the number of the day picks the run of each file, so that every run has its turn, and goes
to its last round. The command fails where one of the seven digits differs. Networks in float32
whose training amplifies rounding have other digits on another kind of processor
(results/repeat.md).
"""

import argparse
import contextlib
import datetime
import io
import logging
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import published
from pfl.errors import ConfigError
from pfl.experiments.grid import Job
from pfl.experiments.jobs import execute
from pfl.experiments.reproduction import Reproduction, rows_of, written

Row = dict[str, Any]


def by_run(name: str) -> tuple[dict[tuple[str, ...], dict[int, Row]], list[str]]:
    """Returns the rows of a file by run and round, and the names of its numbers."""
    runs: dict[tuple[str, ...], dict[int, Row]] = {}
    rows = published.rows(name)
    heads = [*rows[0]]
    if not {"diverged", "round"} <= {*heads}:
        raise ConfigError(f"{name}: has no rounds of runs")
    place = heads[: heads.index("diverged")]
    for row in rows:
        runs.setdefault(tuple(row[k] for k in place), {})[int(row["round"])] = row
    return runs, heads[heads.index("round") + 1 :]


def repeated(job: Job, rounds: int) -> dict[int, Row]:
    """Returns the rows of the first rounds of a run, by round."""
    job = job.with_changes([{"trainer": {"max_epochs": rounds}}])
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        outcome = execute(job, Path(folder))
        return {int(row["round"]): row for row in rows_of(job, Path(folder), outcome)}


def difference(actual: dict[int, Row], file: dict[int, Row], names: list[str]) -> tuple[int, float]:
    """Returns how many numbers both have, and the largest relative difference."""
    pairs = [
        (float(file[number][name]), float(row[name]))
        for number, row in actual.items()
        for name in names
        if name in row and file.get(number, {}).get(name, "") != ""
    ]
    return len(pairs), max((abs(a - b) / max(abs(a), 1e-12) for a, b in pairs), default=0.0)


def other_digits(actual: dict[int, Row], file: dict[int, Row], names: list[str]) -> list[str]:
    """Returns the numbers of a file, to its last round, that a repetition does not have."""
    found = []
    for number, row in file.items():
        for name in names:
            given = row.get(name, "")
            made = actual.get(number, {}).get(name, "")
            if made != "":
                made = written(float(made))
            if given != "":
                given = written(float(given))
            if given != made:
                found.append(
                    f"round {number}, {name}: {made or 'nothing'} for {given or 'nothing'}"
                )
    return found


def jobs_of(name: str, runs: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], Job]:
    """Returns the jobs of the runs of a file, in the order of their places."""
    jobs = {}
    for job in Reproduction.from_file(name).jobs():
        axes = map(written, job.axes.values())
        jobs[(job.run, *axes, str(job.seed))] = job
    return {place: jobs[place] for place in sorted({*runs} & {*jobs})}


def night(name: str, day: int, seconds: int) -> tuple[str, list[str]]:
    """Repeats a run of a file to its last round; returns its line, and the numbers that differ."""
    runs, names = by_run(name)
    jobs = jobs_of(name, runs)
    if not jobs:
        raise ConfigError(f"{name}: has no runs of its file")
    place = [*jobs][day % len(jobs)]
    last = max(runs[place])
    wrong = []
    signal.alarm(seconds)
    try:
        made = repeated(jobs[place], last)
        signal.alarm(0)
        wrong = other_digits(made, runs[place], names)
        compared, worst = difference(made, runs[place], names)
        end = f"{last} | {compared} | {worst:.1e}"
    except TimeoutError:
        end = f"{last} | – | not within {seconds} s"
    finally:
        signal.alarm(0)
    return f"| {name} | {', '.join(place)} | {end} |", wrong


def rows(name: str, count: int, seed: int, seconds: int) -> Iterator[str]:
    """Yields a line for each run that is drawn from a file."""
    runs, names = by_run(name)
    jobs = jobs_of(name, runs)
    known = [*jobs]
    for place in random.Random(f"{seed} {name}").sample(known, min(count, len(known))):
        last = sorted(runs[place])[:3][-1]
        signal.alarm(seconds)
        try:
            compared, worst = difference(repeated(jobs[place], last), runs[place], names)
            end = f"{last} | {compared} | {worst:.1e}"
        except TimeoutError:
            end = f"{last} | – | not within {seconds} s"
        finally:
            signal.alarm(0)
        yield f"| {name} | {', '.join(place)} | {end} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="such as results/fedclup-logit; default: all")
    parser.add_argument("--runs", type=int, default=2, help="of each file")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--seconds", type=int, default=100, help="the longest that a run may take")
    nightly = "a run of each file, to its last round; fails where a digit differs"
    parser.add_argument("--nightly", action="store_true", help=nightly)
    today = datetime.date.today().toordinal()
    parser.add_argument("--day", type=int, default=today, help="picks the runs of --nightly")
    words = parser.parse_args()
    logging.disable(logging.INFO)

    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    print(
        "| data | run | to round | numbers | largest relative difference |\n|---|---|---|---|---|"
    )
    wrong = []
    for name in words.names or published.names():
        try:
            if words.nightly:
                line, differ = night(name, words.day, words.seconds)
                print(line, flush=True)
                wrong += [f"{name}: {one}" for one in differ]
                continue
            for line in rows(name, words.runs, words.seed, words.seconds):
                print(line, flush=True)
        except ConfigError:
            if words.names:
                raise
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
