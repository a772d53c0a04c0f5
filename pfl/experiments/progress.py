"""How far many runs are, read from what they write into their folders."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path

from tqdm import tqdm

from pfl import files
from pfl.callbacks.progress import MINUTE, Ticker, on_terminal, time_left
from pfl.errors import ConfigError
from pfl.experiments.grid import Config
from pfl.experiments.live import NAME, REFRESH, Row, write_page
from pfl.scores.names import candidates
from pfl.scores.runs import OUTCOME

SECOND = 1.0  # between two pictures of the bar
TAIL = 1 << 16  # bytes at the end of a table in which its latest numbers are looked for
DEFAULT_ROUNDS = 100  # of `pfl.Trainer`


@dataclass(frozen=True)
class Expected:
    """A run that an experiment makes: its name, its folder, and its number of rounds."""

    label: str
    folder: Path
    rounds: int

    @classmethod
    def of(cls, label: str, folder: Path, config: Config) -> Expected:
        """Returns what is expected of the run of a configuration."""
        trainer = config.get("trainer") or {}
        rounds = int(trainer.get("max_epochs") or DEFAULT_ROUNDS)  # -1: something else ends it
        return cls(label, folder, max(1, rounds))


class Watch:
    """Tells how far runs are: a bar on a terminal, otherwise a line a minute on the standard error.

    Runs may take place in any process: `metrics.csv` and `outcome.json` in their folders tell.

    Args:
        runs: All runs.
        before: The folders of those that have ended before.
        metric: The score that is shown; None: the one that counts by default.
        page: A page that tells the same, and is written again every few seconds; None: no page.
    """

    def __init__(
        self,
        runs: Sequence[Expected],
        before: Collection[Path] = (),
        metric: str | None = None,
        page: Path | None = None,
    ) -> None:
        self.runs = runs
        self.before = before
        self.metric = metric
        self.page = page
        self._pages: Ticker | None = None
        self._bar: tqdm | None = None

    def __enter__(self) -> Watch:
        self._begun = time.monotonic()
        self._since = time.time()
        self._known = sum(run.rounds for run in self.runs if run.folder in self.before)
        total = sum(run.rounds for run in self.runs)
        if on_terminal():
            form = "{desc}|{bar:20}| [{elapsed}<{remaining}]{postfix}"
            self._bar = tqdm(
                total=total,
                initial=self._known,
                bar_format=form,
                dynamic_ncols=True,
                leave=False,
                file=sys.stderr,
            )
        if self._bar is None:
            seconds = MINUTE
        else:
            seconds = SECOND
        self._ticker = Ticker(self.tell, seconds)
        self._ticker.start()
        if self.page is not None:
            self.write_page()
            self._pages = Ticker(self.write_page, REFRESH)
            self._pages.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ticker.stop()
        if self._pages is not None:
            self._pages.stop()
            self.write_page(ended=True)
        if self._bar is not None:
            self._bar.close()

    def tell(self) -> None:
        """Shows how far the runs are."""
        ended = 0
        rounds = 0.0
        latest = (0.0, "no round has ended")
        for run in self.runs:
            if self._has_ended(run):
                ended += 1
                rounds += run.rounds
                continue
            changed = _changed(run.folder / "metrics.csv")
            if changed < self._since:
                continue  # it has not begun
            row = latest_numbers(run.folder / "metrics.csv")
            rounds += min(row.get("round", 0.0), run.rounds)
            latest = max(latest, (changed, self._words(run, row)))
        if not latest[0] and ended > len(self.before):
            latest = (0.0, "no round of the others has ended")
        if ended == len(self.runs):
            latest = (0.0, "all have ended")
        count = f"[{ended:{len(str(len(self.runs)))}}/{len(self.runs)}]"
        if self._bar is not None:
            self._bar.set_description_str(count, refresh=False)
            self._bar.set_postfix_str(latest[1], refresh=False)
            self._bar.n = int(rounds)
            self._bar.refresh()
            return
        total = sum(run.rounds for run in self.runs)
        left = ""
        if ended < len(self.runs):
            left = time_left(self._begun, rounds - self._known, total - self._known)
        print(f"{count} {latest[1]}{left}", file=sys.stderr, flush=True)

    def write_page(self, ended: bool = False) -> None:
        """Writes the page; once all runs have `ended`, the browser loads it no more."""
        if self.page is None:
            return
        rows = []
        count = 0
        now = 0.0
        for run in self.runs:
            path = run.folder / "metrics.csv"
            has_ended = self._has_ended(run)
            numbers: dict[str, float] = {}
            if has_ended or _changed(path) >= self._since:
                numbers = latest_numbers(path)
            done = numbers.get("round", 0.0)
            early = ""
            if has_ended:
                count += 1
                now += run.rounds  # it has nothing left to do
                if done < run.rounds:
                    early = _how_it_ended(run.folder)
            else:
                now += min(done, run.rounds)
            rows.append(Row(run.label, done, run.rounds, self._score(numbers), early))
        total = sum(run.rounds for run in self.runs)
        left = ""
        if not ended and count < len(self.runs):
            left = time_left(self._begun, now - self._known, total - self._known)
        head = f"{count} of {len(self.runs)} runs have ended{left}"
        title = self.page.parent.name
        with suppress(ConfigError):  # a full disk must not end the runs
            write_page(self.page, title, head, rows, ended)

    def _has_ended(self, run: Expected) -> bool:
        return run.folder in self.before or _changed(run.folder / OUTCOME) >= self._since

    def _words(self, run: Expected, row: dict[str, float]) -> str:
        """Returns the round of a run, and its score so far."""
        words = f"{run.label}: round {row.get('round', 0):.0f}"
        if run.rounds > 1:
            words += f" of {run.rounds}"
        score = self._score(row)
        if score:
            words += f", {score}"
        return words

    def _score(self, row: dict[str, float]) -> str:
        """Returns the score so far of a run; empty before its first evaluation."""
        for split in ("val", "test"):
            for name in candidates(row, split, self.metric)[:1]:
                return f"{split} {name.model} {name.number} {row[str(name)]:.4f}"
        return ""


def live_page(root: Path, live: bool) -> Path | None:
    """Returns the page about the runs in a folder, and says where it is; None if not `live`."""
    if not live:
        return None
    files.make_folder(root, "--live")
    print(f"{root / NAME} shows how far the runs are")
    return root / NAME


def say(line: str) -> None:
    """Prints a line above the bar, if there is one."""
    if parent_process() is not None and sys.stdout.isatty():
        sys.stdout.write("\r\x1b[K")  # the bar is the other process's
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


def latest_numbers(path: Path) -> dict[str, float]:
    """Returns the latest number of each column of a table; none if it has no rows, or is no file.

    A round without an evaluation leaves its scores empty; then those of an earlier round count.
    """
    try:
        with path.open("rb") as file:
            heads = file.readline().decode()
            first = file.tell()
            begin = max(first, file.seek(0, 2) - TAIL)
            file.seek(begin)
            lines = file.read().decode().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):  # the file may be written anew meanwhile
        return {}
    if begin > first:
        lines = lines[1:]  # a part of a line
    latest: dict[str, float] = {}
    for row in csv.DictReader([heads, *(line for line in lines if line.endswith("\n"))]):
        with suppress(TypeError, ValueError):
            latest |= {name: float(value) for name, value in row.items() if value}
    return latest


def _how_it_ended(folder: Path) -> str:
    """Returns in a word how a run ended before its last round."""
    with suppress(ConfigError):  # the file may be damaged
        if files.read_json(folder / OUTCOME).get("status") == "diverged":
            return "diverged"
    return "ended early"


def _changed(path: Path) -> float:
    """Returns the time of a file's last change; 0 if there is no file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
