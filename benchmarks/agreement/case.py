"""One comparison: our method, another implementation, and what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.agreement.problem import Iterates, relative

ROUNDING = 1e-11  # six rounds of float64; real differences here are above 1e-4


@dataclass(frozen=True)
class Case:
    """A method of another project beside ours.

    Attributes:
        method: In the table.
        key: Of the iterates in the file that the project's driver writes; "" where their lines
            were read and not run, so that `reading` stands for them.
        where: Their files and lines.
        compared: The iterates, by their names on both sides.
        ours: Runs our method.
        finding: What they compute instead; "" where both agree.
        reading: Runs our method changed by what `finding` says, which must agree with theirs.
    """

    method: str
    key: str
    where: str
    compared: tuple[str, ...]
    ours: Callable[[], Iterates]
    finding: str = ""
    reading: Callable[[], Iterates] | None = None

    def row(self, theirs: dict[str, Iterates]) -> tuple[str, list[str]]:
        """The line of the table, and what contradicts the finding."""
        found = theirs[self.key] if self.key else self._read()
        ours = self._differences(self.ours(), found)
        wrong = []
        same = all(value < ROUNDING for value in ours.values())
        if same != (not self.finding):
            wrong.append(f"{self.method}: {ours}, finding {self.finding!r}")
        skipped = self.reading is None or not self.key
        after = {} if skipped else self._differences(self._read(), found)
        if any(value >= ROUNDING for value in after.values()):
            wrong.append(f"{self.method} as read: {after}")
        names = ", ".join(self.compared)
        cells = [self.method, self.where, names, _numbers(ours), self._found()]
        return " | ".join(["", *cells, _numbers(after) if after else "", ""]).strip(), wrong

    def _found(self) -> str:
        return ("" if self.key else "Read, not run. ") + (self.finding or "agrees")

    def _read(self) -> Iterates:
        assert self.reading is not None
        return self.reading()

    def _differences(self, ours: Iterates, theirs: Iterates) -> dict[str, float]:
        return {name: relative(ours[name], theirs[name]) for name in self.compared}


def _numbers(differences: dict[str, float]) -> str:
    return ", ".join(f"{value:.0e}" for value in differences.values())


HEADER = (
    "| method | their lines | compared | difference | what they compute | "
    "our method, changed so |\n|---|---|---|---|---|---|"
)
