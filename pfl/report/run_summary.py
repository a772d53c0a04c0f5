"""The table that is printed at the end of a run."""

from __future__ import annotations

from typing import Any

from pfl.errors import in_list, printable
from pfl.report.table import Cell, Column, Table, text
from pfl.scores.names import ScoreName, candidates, models_of, numbers_of

NUMBER_HEADS = {"": "mean", "_std": "std", "_worst10": "worst 10%", "_clients": "clients"}


def summary_table(summary: dict[str, Any]) -> str:
    """Returns a run's summary in a few lines: scores, gains, bytes, parameters."""
    rounds = f"{summary['round']} round{'s' * (summary['round'] != 1)}"
    title = f"{summary['algorithm']}, {rounds}, {summary['wall_seconds']:.0f} s"
    numbers = numbers_of(summary)
    shown = [number for number in numbers if number != "loss" or "accuracy" not in numbers]
    if numbers:
        lines = ["", f"{title}; last round:"]
    else:
        lines = ["", title, "  nothing was tested"]
    for number in shown:
        lines += [f"  {line}" for line in text(_scores(summary, number)).splitlines()]
    if "gained" in summary:
        which = summary.get("model") or "federated"
        lines.append(
            f"  {which} against local: {summary['gained']:.0%} of the clients gained, "
            f"{summary['equal']:.0%} are equal, {summary['lost']:.0%} lost"
        )
    scores = summary.get("lowest_clients", {})
    lowest = [f"{in_list(name)} {score:.4f}" for name, score in scores.items()]
    lost = [in_list(name) for name in summary.get("lost_clients", [])]
    for word, names in (("lowest", lowest), ("lost", lost)):
        if names:
            if len(names) > 5:
                more = f" and {len(names) - 5} more"
            else:
                more = ""
            lines.append(f"  {word}: {', '.join(names[:5])}{more}")
    if words := best_words(summary.get("best"), summary.get("select_by")):
        lines.append(f"  {words}")
    up, down = (size(summary[f"comm/{way}_bytes"]) for way in ("uplink", "downlink"))
    lines.append(f"  sent up {up}, down {down}")
    if "virtual_seconds" in summary:
        lines[-1] += f", in {summary['virtual_seconds']:,.1f} virtual seconds"
    counts = [
        f"{name} {summary[f'parameters/{name}']:,.0f}"
        for name in ("global", "personalized")
        if f"parameters/{name}" in summary
    ]
    if counts:
        lines.append(f"  parameters: {', '.join(counts)}")
    if "privacy" in summary:
        epsilon = f"epsilon {summary['privacy/epsilon']:.2f}"
        lines.append(f"  privacy: {epsilon}, {summary['privacy'].partition(';')[0]}")
    if words := left_out(summary):
        lines.append(f"  left out: {words}")
    lines.append(f"  everything else: {summary['folder']}")
    return "\n".join(map(printable, lines))


def best_words(best: dict[str, Any] | None, select_by: str | None = None) -> str:
    """Returns in words which round is the best by validation, and the test score that counts there.

    Args:
        best: The row of that round (`pfl.scores.runs.best_round`); None: no round was validated.
        select_by: The run's `loop.select_by`.
    """
    if best is None:
        return ""
    names = candidates(best, "test", select_by) or candidates(best, "val", select_by)
    name = names[0]
    split = {"test": "test", "val": "validation"}[name.split]
    score = f"{name.model} {name.number} {best[str(name)]:.4f}"
    return f"best by validation: round {best['round']:.0f}, {split} score {score}"


def _scores(summary: dict[str, Any], number: str) -> Table:
    """Returns a row for each model that was tested."""
    names = [ScoreName("test", model, number) for model in models_of(summary, number)]
    have = [
        suffix for suffix in NUMBER_HEADS if any(f"{name}{suffix}" in summary for name in names)
    ]
    forms = [
        Column(NUMBER_HEADS[suffix], ".0f" if suffix == "_clients" else ".4f") for suffix in have
    ]
    rows: list[list[Cell]] = [
        [name.model, *(summary.get(f"{name}{suffix}", "") for suffix in have)] for name in names
    ]
    return Table([Column(f"test {number}".ljust(21)), *forms], rows)


def left_out(numbers: dict[str, Any]) -> str:
    """Returns in words what the partition leaves out (`FederatedDataModule.left_out`), or ""."""
    words = {
        "samples_unused": ("sample", "that no client has"),
        "clients_without_train_samples": ("client", "without training samples"),
        "clients_without_test_samples": ("client", "without test samples"),
    }
    return ", ".join(
        f"{count:,} {noun}{'s' * (count != 1)} {text}"
        for key, (noun, text) in words.items()
        if (count := numbers.get(key))
    )


def size(count: float) -> str:
    """Returns bytes in a suitable unit, as in "893.92 GB"; 1 kB is 1,000 bytes."""
    unit = "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    if unit == "B":
        return f"{count:,.0f} B"
    return f"{count:,.2f} {unit}"
