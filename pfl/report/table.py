"""The table that is printed at the end of a run."""

from __future__ import annotations

from typing import Any

from pfl.report.results import metric_names, tested_kinds

COLUMNS = {"": "     mean", "_std": "      std", "_worst10": "  worst 10%", "_clients": "  clients"}


def summary_table(summary: dict[str, Any]) -> str:
    """Returns a run's summary in a few lines: scores, gains, bytes, parameters."""
    title = f"{summary['algorithm']}, {summary['round']} rounds, {summary['wall_seconds']:.0f} s"
    lines = ["", title, *(_scores(summary, "accuracy") or _scores(summary, "loss"))]
    for name in metric_names(summary):
        lines += _scores(summary, name)
    if "gained" in summary:
        lines.append(
            f"  against training alone {summary['gained']:.0%} of the clients gained, "
            f"{summary['equal']:.0%} are equal, {summary['lost']:.0%} lost"
        )
    up, down = (size(summary[f"comm/{way}_bytes"]) for way in ("uplink", "downlink"))
    lines.append(f"  sent up {up}, down {down}")
    counts = [
        f"{name} {summary[f'parameters/{name}']:,.0f}"
        for name in ("global", "personalized")
        if f"parameters/{name}" in summary
    ]
    if counts:
        lines.append(f"  parameters: {', '.join(counts)}")
    if told := left_out(summary):
        lines.append(f"  left out: {told}")
    lines.append(f"  everything else: {summary['folder']}")
    return "\n".join(lines)


def left_out(numbers: dict[str, Any]) -> str:
    """Returns what the partition leaves out in words; empty if it leaves out nothing.

    Args:
        numbers: The numbers of `FederatedDataModule.left_out`, perhaps among others.
    """
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


def _scores(summary: dict[str, Any], number: str) -> list[str]:
    """Returns a header and one row for each kind of tested model; nothing if there is none."""
    kinds = {in_words(kind): f"test/{kind}/" for kind in tested_kinds(summary, number)}
    rows = {name: f"{prefix}{number}" for name, prefix in {**kinds, "local": "local/"}.items()}
    rows = {name: key for name, key in rows.items() if key in summary}
    columns = {
        suffix: heading
        for suffix, heading in COLUMNS.items()
        if any(f"{key}{suffix}" in summary for key in rows.values())
    }
    width = max(21, len(number) + 6)
    head = f"  {'test ' + number:<{width}}" + "".join(columns.values())
    lines = [head, "  " + "-" * (len(head) - 2)] if rows else []
    for name, key in rows.items():
        line = f"  {name:<{width}}"
        for suffix, heading in columns.items():
            value = summary.get(f"{key}{suffix}")
            digits = 0 if suffix == "_clients" else 4
            line += " " * len(heading) if value is None else f"{value:{len(heading)}.{digits}f}"
        lines.append(line.rstrip())
    return lines


def in_words(kind: str) -> str:
    """Returns a kind of model in words: "finetuned, 5 steps" for "finetuned/5"."""
    name, _, steps = kind.partition("/")
    return f"{name}, {steps} step{'s' * (steps != '1')}" if steps else name


def size(count: float) -> str:
    """Returns bytes in a suitable unit, as in "893.92 GB"; 1 kB is 1,000 bytes."""
    unit = "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
