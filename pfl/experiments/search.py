"""A search for a better method: its author edits one file, and everything else is done here.

A try scores the file as it stands on validation samples. A look judges the best try on test samples
of seeds that are drawn at that moment, so that neither the author nor a program can have used them.
"""

from __future__ import annotations

import functools
import json
import math
import secrets
import shutil
import sys
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import numpy as np

from pfl import files
from pfl.datamodules.errors import require_value
from pfl.datamodules.ranges import Checked, Count, Positive, ProperShare
from pfl.errors import ConfigError
from pfl.experiments.comparison import Comparison
from pfl.experiments.grid import Config, Job
from pfl.experiments.jobs import check_jobs, code_version, own_file, read_run, run_all
from pfl.scores.names import direction
from pfl.scores.runs import Run
from pfl.scores.statistics import (
    ROUNDING,
    pooled_deviation,
    seeds_test,
    seeds_to_choose,
    seeds_to_find,
)

RECORD = "search.jsonl"
LEAST = 8  # held-out seeds of a look
CHOSEN = 0.97  # the probability that the better one of all tries is the best on validation samples
FOUND = 0.98  # that a look finds it, if the spread is known; it is estimated from the tries
VERDICTS = {1: "improves", 0: "cannot be told from it", -1: "worse"}
# By the split that counts: a try has no test scores that one could read, and a look has both.
EVALUATED = {
    "val": {"loop": {"evaluate": ["val"]}},
    "test": {"loop": {"evaluate": ["val", "test"]}},
}


@dataclass(frozen=True, kw_only=True)
class Rules(Checked):
    """What a search may use, and what it must show.

    Args:
        tries: Number of versions of the file that may be scored.
        looks: Number of versions that may be judged on held-out seeds; they share `level`.
        level: The chance that the search ends with a difference that is none.
        find: The difference that a look must find, in the units of the score.
        held_out: The most seeds of a look.

    Raises:
        ConfigError: A value does not fit.
    """

    argument_group: ClassVar[str] = "search"
    tries: Count = 20
    looks: Count = 1
    level: ProperShare = 0.05
    find: Positive = 0.02
    held_out: Count = 60

    def __post_init__(self) -> None:
        holds = self.held_out >= LEAST
        require_value("search.held_out", self.held_out, holds, f"at least {LEAST}")


@dataclass(frozen=True)
class Scores:
    """What the runs of a method have reached.

    Attributes:
        name: The score, such as `val/personalized/accuracy`.
        values: A number for each seed; NaN: the run has diverged.
        larger_is_better: Whether large ones are good.
    """

    name: str
    values: np.ndarray
    larger_is_better: bool = True

    def mean(self) -> float | None:
        """Returns the mean over the seeds; None if a run has diverged."""
        return _number(self.values.mean())

    def gains(self, other: Scores) -> np.ndarray:
        """Returns by how much each seed is better than under `other`; 0 for rounding alone."""
        with np.errstate(invalid="ignore"):  # two infinite losses decide nothing
            differences = self.values - other.values
        largest = np.maximum(np.abs(self.values), np.abs(other.values))
        rounding = np.isfinite(largest) & (np.abs(differences) <= ROUNDING * largest)
        differences[rounding] = 0.0
        if self.larger_is_better:
            return differences
        return -differences


@dataclass(frozen=True, kw_only=True)
class Search(Comparison):
    """A comparison of two runs, one of which is the class of a file that changes.

    Its file is that of a comparison with the key `search` (docs/tune.md); `seeds` are those of
    every try.

    Args:
        search: What the search may use.
    """

    search: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = len(self.runs) == 2 and not self.grid
        expected = "two runs, the baseline and the class of your file, without a grid"
        require_value("runs", ", ".join(self.runs), holds, expected)

    @property
    def candidate(self) -> str:
        """The run whose file changes."""
        return next(run for run in self.runs if run != self.baseline)

    # ---- the two steps -----------------------------------------------------------------------

    def attempt(self, root: Path, jobs: int | None = 1) -> Config:
        """Scores the file as it stands on validation samples, and returns the record of the try.

        A version that was tried before costs nothing, and has the record of its first try.

        Raises:
            ConfigError: All tries are used up, another process tries or judges, or a run has failed
                by a mistake.
        """
        with self._alone(root):
            return self._attempt(root, jobs)

    def _attempt(self, root: Path, jobs: int | None) -> Config:
        records = self.records(root)
        tries = [record for record in records if "gain" in record]
        version = self.version()
        for record in tries:
            if record["version"] == version:
                return record
        if len(tries) >= self.search.tries:
            raise ConfigError(f"search: all {self.search.tries} tries are used up; judge the best")
        self.source_file()
        seeds = [job.seed for job in self.jobs() if job.run == self.candidate]
        ours = self.measure(self.candidate, seeds, root / "tries", jobs, "val")
        theirs = self.measure(str(self.baseline), seeds, root / "tries", jobs, "val")
        gains = ours.gains(theirs)
        record = {
            "try": len(tries) + 1,
            "of": self.search.tries,
            "score": ours.mean(),
            "baseline": theirs.mean(),
            "gain": _number(gains.mean()),
            "gains": [_number(gain) for gain in gains],
            "selected_by": ours.name,
            "version": version,
            "copy": str(self.keep_version(root, len(tries) + 1)),
        }
        best = best_try([*tries, record])
        record["best"] = best and best["try"]
        record |= self.plan([*tries, record])
        return self.note(root, record)

    def judge(self, root: Path, jobs: int | None = 1) -> Config:
        """Judges the best try on test samples of new seeds, and returns the record of the look.

        A look that was interrupted goes on if no better try was made since; otherwise it is used
        up.

        Raises:
            ConfigError: There is no try or no look left, the file is not that of the best try,
                another process tries or judges, or a run has failed by a mistake.
        """
        with self._alone(root):
            return self._judge(root, jobs)

    def _judge(self, root: Path, jobs: int | None) -> Config:
        records = self.records(root)
        tries = [record for record in records if "gain" in record]
        best = best_try(tries)
        if best is None:
            raise ConfigError("search: no try has a score yet; run `pfl search try` first")
        if self.version() != best["version"]:
            raise ConfigError(
                f"search: the best one is try {best['try']}, and this code is another; copy "
                f"{best['copy']} back, or try this code"
            )
        look = self._begin(root, records, best)
        folder = root / f"look{look['look']}"
        ours = self.measure(self.candidate, look["seeds"], folder, jobs, "test")
        theirs = self.measure(str(self.baseline), look["seeds"], folder, jobs, "test")
        gains = ours.gains(theirs)
        test = seeds_test(gains, self.level)
        record = {
            "look": look["look"],
            "looks": self.search.looks,
            "best": best["try"],
            "tried": len(tries),
            "verdict": VERDICTS[test.sign],
            "baseline": self.baseline,
            "difference": _number(test.difference),
            "low": _number(test.low),
            "high": _number(test.high),
            "p": _number(test.p),
            "level": self.level,
            "score": ours.mean(),
            "baseline_score": theirs.mean(),
            "metric": ours.name,
            "gains": [_number(gain) for gain in gains],
        }
        return self.note(root, record)

    def _alone(self, root: Path) -> AbstractContextManager[None]:
        """Returns a context in which no other process tries or judges, so that budgets hold."""
        files.make_folder(root, "--out")
        taken = f"search: another process works in {root}; wait until it has ended, or end it"
        return files.locked(root / ".lock", taken)

    def _begin(self, root: Path, records: list[Config], best: Config) -> Config:
        """Returns the look at a try that was interrupted, or notes the beginning of a new one."""
        begun = [record for record in records if "seeds" in record]
        ended = [record["look"] for record in records if "verdict" in record]
        for look in begun:
            if look["best"] != best["try"]:
                continue
            if look["look"] not in ended:
                return look
            raise ConfigError(
                f"search: try {best['try']} has been judged; only a better one can be judged next"
            )
        if len(begun) >= self.search.looks:
            raise ConfigError(f"search: no look is left of {self.search.looks}")
        used = {seed for look in begun for seed in look["seeds"]}
        seeds = self.draw(self.plan(records)["seeds_of_a_look"], used)
        look = {"look": len(begun) + 1, "best": best["try"], "version": best["version"]}
        return self.note(root, {**look, "seeds": seeds})

    @property
    def level(self) -> float:
        """The level of one look: all looks share that of the search."""
        return self.search.level / self.search.looks

    def plan(self, records: list[Config]) -> dict[str, int]:
        """Returns how many seeds a try and a look need to find the difference `find`.

        It rests on the spread of the gains of the tries. Held-out seeds take no part in it, so that
        the test on them stays exact.
        """
        most = self.search.held_out
        groups = [np.array(r["gains"]) for r in records if r.get("gain") is not None]
        # A version that changes nothing tells nothing about the spread, and neither does one seed.
        deviation = pooled_deviation([gains for gains in groups if gains.any()])
        if deviation is None:
            return {"seeds_of_a_try": most, "seeds_of_a_look": most}
        find = self.search.find
        own = deviation / math.sqrt(2)  # the other half of the variance is the baseline's
        return {
            "seeds_of_a_try": seeds_to_choose(find, own, self.search.tries, CHOSEN, most),
            "seeds_of_a_look": seeds_to_find(find, deviation, self.level, FOUND, LEAST, most),
        }

    # ---- what the steps rest on ---------------------------------------------------------------

    @functools.cached_property
    def design(self) -> str:
        """A digest of the whole file, which must not change during a search."""
        configs = [job.config for job in self.jobs()]
        about = [configs, self.baseline, self.metric, self.budget, vars(self.search)]
        return sha256(json.dumps(about, default=str).encode()).hexdigest()[:16]

    def records(self, root: Path) -> list[Config]:
        """Returns what has happened in a folder so far.

        Raises:
            ConfigError: The record is damaged, or is that of another file.
        """
        path = root / RECORD
        records = []
        if path.is_file():
            with files.reading(path):
                lines = path.read_text(encoding="utf-8").splitlines()
                records = [json.loads(line) for line in lines]
        for record in records:
            if record.pop("design", None) != self.design:
                raise ConfigError(
                    f"search: the file has changed since {root} was begun, which gives the tries "
                    "another meaning; put it back, or begin anew with --out"
                )
        return records

    def note(self, root: Path, record: Config) -> Config:
        """Adds a line to the record in a folder, and returns what it says."""
        line = json.dumps({**record, "design": self.design})
        files.append(root / RECORD, f"{line}\n".encode())
        return record

    def version(self) -> str:
        """Returns a digest of the code that the candidate runs."""
        return code_version(json.dumps(self._candidate_job().config, default=str))

    def keep_version(self, root: Path, number: int) -> Path:
        """Copies the candidate's file into a folder of the try; returns the path of the copy."""
        folder = root / "versions" / str(number)
        files.make_folder(folder, "--out")
        return Path(shutil.copy(self.source_file(), folder))

    def source_file(self) -> Path:
        """Returns the file of the candidate's class.

        Raises:
            ConfigError: The class is none of the user's own.
        """
        method = str(self._candidate_job().config["model"].get("class_path"))
        module = method.rpartition(".")[0]
        path = None
        if module:
            path = own_file(module)
        if path is None:
            raise ConfigError(
                f"search: runs.{self.candidate}.model.class_path: {method}; it must be a class of "
                "a file in this folder, such as mine.Mine"
            )
        return path

    def draw(self, number: int, used: set[int]) -> list[int]:
        """Returns new seeds that nobody could know before."""
        seeds: list[int] = []
        while len(seeds) < number:
            seed = secrets.randbelow(2**31)
            if seed not in used:
                seeds.append(seed)
                used.add(seed)
        return seeds

    def measure(
        self, run: str, seeds: list[int], root: Path, jobs: int | None, split: str
    ) -> Scores:
        """Returns what the runs with these seeds have reached on validation or test samples.

        The round that counts is the best one on validation samples in both cases.
        """
        change: list[Config] = [EVALUATED[split]]
        made = [
            job.with_changes(change) for job in replace(self, seeds=seeds).jobs() if job.run == run
        ]
        with redirect_stdout(sys.stderr):  # the standard output has the record alone
            check_jobs(made, self.metric, validated=True, tested=True)
            outcomes = run_all(made, root, workers=jobs, metric=self.metric)
        read = [read_run(job, root, outcomes[job.folder]) for job in made]
        found = [self._score(one, split) for one in read]
        name = next((name for name, _ in found if name), "")
        values = np.array([value for _, value in found])
        return Scores(name, values, direction(name, read[0].metrics) is not False)

    def _score(self, run: Run, split: str) -> tuple[str, float]:
        best = run.best_round(run.within(self.limit), self.metric)
        if run.diverged or best is None:
            return "", np.nan
        name = f"{split}/{best['selected_by'].partition('/')[2]}"
        return name, best[name]

    def _candidate_job(self) -> Job:
        return next(job for job in self.jobs() if job.run == self.candidate)


def best_try(tries: list[Config]) -> Config | None:
    """Returns the try with the largest gain, the first of equal ones; None without any gain."""
    have = [record for record in tries if record["gain"] is not None]
    return max(have, key=lambda record: record["gain"], default=None)


def _number(value: float) -> float | None:
    """Returns a number for JSON, which has no NaN."""
    if np.isnan(value):
        return None
    return float(value)
