"""The tables of a page, from the lines of cases.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Line = dict[str, Any]
PEERS = ("pfl-research", "fedjax", "pfllib")
LAUNCH_BOUND = 0.5  # of the time that the card works
HEAD = (
    "| side | round, ms (least) | first, s | images / s | share of the rate | kernels | launches | "
    "card busy | GPU, MiB | host, MiB | weights apart | notes |"
)


def markdown(lines: Sequence[Line]) -> str:
    """Returns all tables."""
    by_case = {line["case"]: line for line in lines}  # the last one of each
    text = ["# On a GPU", "", *_machine(by_case.get("machine", {})), ""]
    text += _summary(by_case)
    text += _checks(by_case)
    text += _rates(by_case)
    text += _timed(by_case)
    return "\n".join(text)


def _machine(line: Line) -> Iterator[str]:
    if "device" not in line:
        yield "Not measured, or no case `machine`."
        return
    names = ("torch", "cuda", "cudnn", "lightning", "torchmetrics", "numpy", "python")
    versions = ", ".join(f"{name} {line[name]}" for name in names if line.get(name))
    yield (
        f"{line['device']}, {line['cores']} cores, {line['date']}; {versions}. Medians of rounds "
        f"after the first two, the card waited for at both ends; by `python -m benchmarks.gpu`."
    )


def _summary(by_case: dict[str, Line]) -> Iterator[str]:
    """Yields our rounds beside the loops by hand and the other frameworks, in float32."""
    shapes = [name.removesuffix("/fp32/ours") for name in by_case if name.endswith("/fp32/ours")]
    if not shapes:
        return
    yield "## Milliseconds of a round, float32 without TF32"
    yield ""
    yield (
        "| shape | ours | card busy | plain loop by hand | fastest loop by hand | "
        + " | ".join(PEERS)
        + " |"
    )
    yield "|---" * (5 + len(PEERS)) + "|"
    for shape in shapes:
        ours = by_case[f"{shape}/fp32/ours"]
        if "ms" not in ours:
            continue
        sides = {
            name.removeprefix(f"{shape}/fp32/"): line["ms"]
            for name, line in by_case.items()
            if name.startswith(f"{shape}/fp32/") and "ms" in line
        }
        hand = {side: ms for side, ms in sides.items() if side.startswith("hand-")}
        fastest = ""
        if hand:
            side = min(hand, key=lambda side: hand[side])
            fastest = f"{_times(hand[side], ours['ms'])}, {side.removeprefix('hand-')}"
        cells = [
            shape,
            f"{ours['ms']:.1f}",
            _number(ours.get("busy"), ".0%"),
            _times(sides.get("hand-plain"), ours["ms"]),
            fastest,
            *(_times(sides.get(peer), ours["ms"]) for peer in PEERS),
        ]
        yield "| " + " | ".join(cells) + " |"
    yield ""


def _times(ms: float | None, ours: float) -> str:
    """Returns a time and how many times ours it is."""
    if ms is None:
        return ""
    return f"{ms:.1f} ({ms / ours:.2g}x)"


def _checks(by_case: dict[str, Line]) -> Iterator[str]:
    found = {name: line for name, line in by_case.items() if name.startswith("check/")}
    if not found:
        return
    right = sum(line["ok"] and "skipped" not in line for line in found.values())
    yield f"## Is it right there? {right} of {len(found)} checks hold"
    yield ""
    yield "| check | holds | numbers |"
    yield "|---|---|---|"
    for name, line in found.items():
        yield f"| {name.removeprefix('check/')} | {_verdict(line)} | {_numbers(line)} |"
    yield ""


def _verdict(line: Line) -> str:
    if "skipped" in line:
        return "skipped"
    if line["ok"]:
        return "yes"
    return "**no**"


def _numbers(line: Line) -> str:
    words = []
    if "distance" in line:
        words.append(f"relative distance {line['distance']:.1e} ({line.get('of', '')})")
    for name in ("limit", "engine", "equal", "rounds", "used", "skipped", "error", "says"):
        if line.get(name) not in (None, [], ""):
            words.append(f"{name} {line[name]}")
    if line.get("differ"):
        words.append(f"differ: {', '.join(line['differ'])}")
    return plain("; ".join(words))


def _rates(by_case: dict[str, Line]) -> Iterator[str]:
    words = [
        f"{name.removeprefix('rate/')} {line['operations_s'] / 1e12:.2f}"
        for name, line in by_case.items()
        if name.startswith("rate/") and "operations_s" in line
    ]
    if words:
        yield f"A large matrix product, TFLOP/s: {', '.join(words)}."
        yield ""


def _timed(by_case: dict[str, Line]) -> Iterator[str]:
    groups: dict[str, list[Line]] = {}
    for name, line in by_case.items():
        shape, *rest = name.split("/")
        if len(rest) == 2 and shape != "check":
            groups.setdefault(f"{shape}, {rest[0]}", []).append(line)
    for title, lines in groups.items():
        yield f"## {title}"
        yield ""
        yield HEAD
        yield "|---" * 12 + "|"
        for line in lines:
            yield _row(line, by_case)
        yield ""


def _row(line: Line, by_case: dict[str, Line]) -> str:
    _, precision, side = line["case"].split("/")
    if "ms" not in line:
        reason = line.get("skipped") or f"failed: {line.get('error')}"
        return f"| {side} |" + " |" * 10 + f" {plain(reason)} |"
    rate = by_case.get(f"rate/{precision}", {}).get("operations_s")
    share = ""
    if rate and line.get("operations_s"):
        share = f"{line['operations_s'] / rate:.1%}"
    cells = [
        side,
        f"{line['ms']:.2f} ({line['min_ms']:.2f})",
        _number(line.get("first_s"), ".2f"),
        _number(line.get("images_s"), ",.0f"),
        share,
        _number(line.get("kernels"), ",d"),
        _number(line.get("launches"), ",d"),
        _number(line.get("busy"), ".0%"),
        _number(line.get("gpu_mib"), ",.0f"),
        _number(line.get("host_mib"), ",.0f"),
        _number(line.get("distance"), ".1e"),
        _notes(line),
    ]
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return format(value, form)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


def _notes(line: Line) -> str:
    notes = []
    if line.get("engine"):
        notes.append(f"engine {line['engine']}")
    if line.get("timed"):
        timed = ", ".join(f"{name} {_short(ms)}" for name, ms in line["timed"].items())
        notes.append(f"timed, ms a step: {timed}")
    if line.get("busy") is not None and line["busy"] < LAUNCH_BOUND:
        notes.append("launch-bound")
    if "evaluation" in line:
        share = f"{line['evaluation']:.0%}"
        notes.append(f"{line['bare_ms']:.2f} ms without evaluation, which takes {share} of it")
    if "evaluated_ms" in line:
        notes.append(f"{line['evaluated_ms']:.2f} ms with its evaluation")
    return plain("; ".join(notes))


def plain(text: str) -> str:
    """Returns text that fits into a cell of a table."""
    return " ".join(text.replace("|", "/").split())[:300]
