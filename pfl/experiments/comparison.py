"""A comparison of methods on equal terms: the same partitions, cohorts, seeds and budgets."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pfl.datamodules.errors import require_value
from pfl.experiments.grid import Grid
from pfl.experiments.jobs import finished_outcome, read_run, run_all
from pfl.experiments.results import Results
from pfl.report.comparison_tables import check_columns
from pfl.scores.runs import BUDGETS

C = TypeVar("C", bound="Comparison")
SPENT = ("trials", "rounds", "gradients", "seconds")  # what tuning takes


@dataclass(frozen=True, kw_only=True)
class Comparison(Grid):
    """Runs of several methods with several seeds.

    docs/compare.md explains its file.

    Args:
        baseline: The run with which the others are compared; the first one by default.
        metric: The score that counts, such as `f1_score`; None: accuracy, or loss for regression.
        budget: What cuts all runs; None: whole runs.
        bandwidth: Bits a second of each client; None: no figure of the time of communication.
        tuning: What each run's tuning took.

    Example:
        >>> network = {"class_path": "MLP", "init_args": {"in_features": 64}}
        >>> comparison = Comparison(
        ...     common={
        ...         "model.init_args.network": network,
        ...         "data": {"class_path": "DigitsDataModule", "init_args": {"num_clients": 20}},
        ...     },
        ...     runs={name: {"model.class_path": name} for name in ("FedAvg", "Ditto")},
        ...     seeds=3,
        ... )
        >>> [str(job) for job in comparison.jobs()][2:4]
        ['FedAvg, seed=2', 'Ditto, seed=0']
    """

    baseline: str | None = None
    metric: str | None = None
    budget: dict[str, float] | None = None
    bandwidth: float | None = None
    tuning: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline is None:
            baseline = self.jobs()[0].run
        else:
            baseline = self.baseline
        object.__setattr__(self, "baseline", baseline)
        known = f"one of {', '.join(self.runs)}"
        require_value("baseline", baseline, baseline in self.runs, known)
        for run, spent in self.tuning.items():
            require_value("tuning", run, run in self.runs, known)
            expected = f"numbers of {', '.join(SPENT)}"
            require_value(f"tuning.{run}", spent, spent.keys() <= {*SPENT}, expected)
        limits = [*(self.budget or {"rounds": 1.0}).items()]
        holds = len(limits) == 1 and limits[0][0] in BUDGETS and 0 < limits[0][1] < math.inf
        expected = f"one of {', '.join(BUDGETS)} and a positive number"
        require_value("budget", self.budget, holds, expected)
        holds = self.metric is None or not self.metric.startswith(("val/", "test/"))
        expected = "a score without its split, such as f1_score or global/accuracy"
        require_value("metric", self.metric, holds, expected)
        holds = self.bandwidth is None or 0 < self.bandwidth < math.inf
        require_value("bandwidth", self.bandwidth, holds, "a number of bits a second, such as 1e8")

    def part(self: C, only: str | None, seed: int | None) -> C:
        part = super().part(only, seed)
        if part is self:
            return part
        runs = [job.run for job in part.jobs()]
        if part.baseline in runs:
            return part
        return replace(part, baseline=runs[0])

    @property
    def limit(self) -> tuple[str, float] | None:
        """The name and the number of the budget; None: whole runs."""
        if self.budget:
            return next(iter(self.budget.items()))
        return None

    def run(
        self,
        out: str | Path | None = None,
        *,
        jobs: int | None = 1,
        share: tuple[int, int] = (1, 1),
        keep: bool = False,
        live: bool = False,
        paper: Sequence[str] = (),
    ) -> Results:
        """Makes the runs that have not been made, and returns the results of all.

        Args:
            out: The folder of the runs; `runs/compare/<name>` by default.
            jobs: Number of processes; None: as many as fit. With more than one, a script needs
                `if __name__ == "__main__"`.
            share: (k, n): makes the k-th of n shares of the runs, for n machines with one file
                system.
            keep: Keeps checkpoints: of each run the last one, and that of the best round on
                validation data.
            live: Writes `live.html`, a page that tells how far the runs are.
            paper: The columns that `Results.write` will get: one that no run can have is refused
                before the first run, unless other machines make some of the runs.

        Raises:
            ConfigError: A configuration has a mistake, or a run failed by one.
            Missing: Other machines have not finished their shares.
        """
        root = self.folder("compare", None if out is None else Path(out))
        all_jobs = self.jobs()
        mine = all_jobs[share[0] - 1 :: share[1]]
        check = None
        if len(mine) == len(all_jobs):
            check = functools.partial(
                check_columns, paper, metric=self.metric, tuned=bool(self.tuning)
            )
        outcomes = run_all(
            mine,
            root,
            workers=jobs,
            keep=keep,
            metric=self.metric,
            budget=self.limit,
            live=live,
            check=check,
        )
        for job in all_jobs:
            if job.folder not in outcomes:
                outcomes[job.folder] = finished_outcome(job, root)
        if missing := [str(job) for job in all_jobs if not outcomes[job.folder]]:
            raise Missing(
                f"{len(missing)} runs of other machines are missing, or have another "
                f"configuration, code or data, such as {missing[0]}"
            )
        return Results.of(
            [read_run(job, root, outcomes[job.folder]) for job in all_jobs],
            baseline=self.baseline,
            budget=self.limit,
            metric=self.metric,
            title=str(self.title),
            tuning=self.tuning,
            bandwidth=self.bandwidth,
        )


class Missing(Exception):
    """Runs of other machines have not ended; the message is one line."""
