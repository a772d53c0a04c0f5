"""The table of `benchmarks/compare.py`."""

from collections.abc import Callable
from statistics import median

from benchmarks.peers.task import Report
from benchmarks.workloads import BATCH, RATE, WORKLOADS

Results = dict[tuple[str, str], list[Report | str]]


def markdown(
    keys: list[str], sides: list[str], others: list[str], results: Results, machine: str
) -> str:
    """Times, ratios, scores and versions.

    Args:
        keys: Workloads, the columns.
        sides: Frameworks, the rows; those whose names begin with "this framework" are ours.
        others: Those among the sides that are other frameworks.
        results: Of each side and workload: a report, or in words what went wrong, for every run.
        machine: In words.
    """
    ours = [side for side in sides if side.startswith("this framework")]
    hand = [side for side in sides if side not in ours and side not in others]
    lines = [
        "One round of FedAvg in milliseconds: median (minimum - maximum) of all timed rounds.",
        "",
        *rows("framework", sides, keys, results, times),
    ]
    lines += [ratios("best by hand / this framework", hand, ours, keys, results)]
    if others:
        lines += [ratios("best other framework / this framework", others, ours, keys, results)]
    lines += [
        "",
        f"SGD with rate {RATE}, batches of {BATCH}, float32, no evaluation; a round of each:",
        "",
        *(f"* {key}: {words(key)}" for key in keys),
        "",
        "## Equal work",
        "",
        "After the last round: accuracy and loss on every seventh sample, and the norm of what was",
        "added to the weights. Cohorts and first weights are the same for all, the order of a",
        "client's samples is not.",
        "",
        *rows("framework", sides, keys, results, scores),
        "",
        "## First round",
        "",
        "Seconds of the first round, which is not in the table above: compiling, starting actors.",
        "",
        *rows("framework", sides, keys, results, firsts),
        "",
        "## Versions and machine",
        "",
        *(f"* {side}: {versions(side, keys, results)}" for side in sides),
        f"* {machine}",
    ]
    return "\n".join(lines) + "\n"


def rows(
    corner: str,
    sides: list[str],
    keys: list[str],
    results: Results,
    cell: Callable[[list[Report]], str],
) -> list[str]:
    """A table of what `cell` makes of the reports; a failure is said in its place."""
    titles = [f"{key} {WORKLOADS[key].title}" for key in keys]
    lines = [f"| {corner} | {' | '.join(titles)} |", "|---" * (len(keys) + 1) + "|"]
    for side in sides:
        cells = []
        for key in keys:
            entries = results.get((side, key), [])
            failures = [entry for entry in entries if isinstance(entry, str)]
            cells.append(failures[0] if failures else cell(reports(entries)) if entries else "")
        lines.append(f"| {side} | {' | '.join(cells)} |")
    return lines


def reports(entries: list[Report | str]) -> list[Report]:
    return [entry for entry in entries if isinstance(entry, Report)]


def seconds(found: list[Report]) -> list[float]:
    return [value for report in found for value in report.seconds]


def times(found: list[Report]) -> str:
    ms = [1000 * value for value in seconds(found)]
    return f"{median(ms):,.0f} ({min(ms):,.0f} - {max(ms):,.0f})"


def scores(found: list[Report]) -> str:
    return f"{found[-1].accuracy:.3f}, {found[-1].loss:.3f}, {found[-1].moved:.2f}"


def firsts(found: list[Report]) -> str:
    return f"{median(report.first for report in found):.1f}"


def ratios(title: str, sides: list[str], ours: list[str], keys: list[str], results: Results) -> str:
    """A row: the least median of some sides by the least of ours."""
    cells = []
    for key in keys:
        best = [least(group, key, results) for group in (sides, ours)]
        cells.append(f"{best[0] / best[1]:.2f}" if all(best) else "")
    return f"| **{title}** | {' | '.join(cells)} |"


def least(sides: list[str], key: str, results: Results) -> float:
    """The least median of some sides; 0 where none has finished."""
    medians = [median(s) for x in sides if (s := seconds(reports(results.get((x, key), []))))]
    return min(medians, default=0.0)


def words(key: str) -> str:
    w = WORKLOADS[key]
    return (
        f"{w.title}, {w.per_round} of {w.clients} clients with {w.samples} samples of "
        f"{'x'.join(map(str, w.shape))}, {w.epochs} local epochs"
    )


def versions(side: str, keys: list[str], results: Results) -> str:
    found = [report for key in keys for report in reports(results.get((side, key), []))]
    return ", ".join(f"{k} {v}" for k, v in found[-1].versions.items()) if found else "never ran"
