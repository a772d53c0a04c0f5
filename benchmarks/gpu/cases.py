"""The cases in the order of their importance: what is right first, then what is fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

W = ("W1", "W2", "W3", "W4", "W5")
ENGINES = ("auto", "sequential", "vmap")
OF_CHAINS = {"W1": ("auto", "sequential"), "W2": ("auto", "sequential")}  # vmap means a chain
HAND = ("plain", "foreach", "graph", "func", "func-graph")
FASTEST = {"W4": ("graph",), "W5": ("graph",)}  # by hand, where it is not all clients at once
FLUTE = ("FLUTE-LR", "FLUTE-FEMNIST", "FLUTE-CIFAR100", "FLUTE-SHAKESPEARE")
CHECKS = (  # of `checks.CHECKS`; named here, so that the driver need not import torch
    "draws",
    *(f"iterates/{name}, MLP" for name in ("FedAvg", "FedCLUP", "FedSLR", "SCAFFOLD")),
    "iterates/FedAvg, LeNet-5",
    "iterates/FedAvg, ResNet",
    "iterates/FedAvg, BatchNorm",
    "dropout",
    "resume/FedAvg, MLP",
    "resume/FedCLUP, MLP",
    "resume/SCAFFOLD, MLP",
    "resume/FedAvg, ResNet",
    "repeat/FedAvg, MLP",
    "repeat/FedAvg, ResNet",
    "repeat/FedAvg, LeNet-5",
    "states",
    "out-of-memory",
    *(
        f"iterates/{name}, MLP"
        for name in (
            "FedAvg, Adam",
            "FedAvg, momentum",
            "FedProx",
            "FedDyn",
            "Ditto",
            "pFedMe",
            "APFL",
            "FedBABU",
            "FedRep",
            "MOON",
            "FedProto",
            "FedAgg",
            "FedACS",
            "FedPD",
            "FedPD, VR",
        )
    ),
    "iterates/FedCLUP, LeNet-5",
    "iterates/FedSLR, LeNet-5",
    "iterates/FedCLUP, ResNet",
    "iterates/FedSLR, ResNet",
    "two-processes",
    "command-line",
)
LIMIT = 45.0  # seconds of a case, after which its process is ended
LONG = {"check/two-processes": 100.0, "check/command-line": 100.0}
PEER_LIMITS = {"pfl-research": 60.0, "fedjax": 60.0, "pfllib": 120.0}
COMPILE_LIMIT = 90.0


@dataclass(frozen=True)
class Case:
    """A line of cases.jsonl.

    Attributes:
        name: Such as W1/fp32/hand-graph.
        worker: The process that does it: "checks", "ours", "hand", or "peers" for a new one.
        job: What it is told.
        limit: Seconds after which the process is ended.
    """

    name: str
    worker: str
    job: dict[str, Any]
    limit: float = LIMIT


def all_cases(peers: bool) -> list[Case]:
    """Returns every case in order; with `peers` the other frameworks, too."""
    cases = [Case("machine", "ours", {"do": "machine"})]
    cases.append(Case("rate/fp32", "ours", {"do": "rate", "precision": "fp32"}))
    for name in CHECKS:
        limit = LONG.get(f"check/{name}", LIMIT)
        cases.append(Case(f"check/{name}", "checks", {"do": "check", "check": name}, limit))
    cases += _timed()
    if not peers:
        cases = [case for case in cases if case.worker != "peers"]
    return cases


def _timed() -> Iterator[Case]:
    for key in W:
        yield from _ours(key, "fp32", ("auto",))
        yield from _hand(key, "fp32", ("plain", *FASTEST.get(key, ("graph", "func-graph"))))
    yield from _ours("PFLlib", "fp32", ("auto",))
    yield from _ours("W5-BatchNorm", "fp32", ("auto", "sequential"))
    yield _evaluated("PFLlib")
    yield from _hand("PFLlib", "fp32", ("graph",))
    yield from _peers("PFLlib", "pfllib")
    yield from _ours("CIFAR", "fp32", ("auto",))
    yield from _hand("CIFAR", "fp32", ("plain", "graph", "func-graph"))
    yield from _peers("CIFAR", "pfl-research", "fedjax")
    for key in FLUTE:
        yield from _ours(key, "fp32", ("auto",))
        yield from _hand(key, "fp32", ("graph",))
    for key in ("W3x100", "W3x1000"):
        yield from _ours(key, "fp32", ("auto",))
        yield from _hand(key, "fp32", ("func-graph",))
    yield from _ours("FedCLUP", "fp32", ("auto",))
    yield from _ours("FedSLR", "fp32", ("auto",))
    yield Case(
        "EVALUATION/fp32/ours-evaluated", "ours", {"do": "evaluation", "shape": "EVALUATION"}
    )
    yield from _ours("LoRA", "fp32", ("auto",))
    yield from _hand("LoRA", "fp32", ("plain", "graph"))
    for precision in ("tf32", "bf16"):
        yield Case(f"rate/{precision}", "ours", {"do": "rate", "precision": precision})
        for key in (*W, "CIFAR"):
            yield from _ours(key, precision, ("auto",))
            yield from _hand(key, precision, FASTEST.get(key, ("func-graph",)))
    for key in W:
        yield from _peers(key, "pfl-research", "fedjax")
    for key in (*W, "CIFAR"):
        yield from _ours(key, "fp32", ("sequential", "vmap"))
        yield from _hand(key, "fp32", ("foreach", "func"))
    for key in ("W2", "W3", "W5"):
        yield from _hand(key, "fp32", ("compile",))


def _ours(shape: str, precision: str, engines: tuple[str, ...]) -> Iterator[Case]:
    for engine in engines:
        name = f"{shape}/{precision}/ours"
        if engine != "auto":
            name += f"-{engine}"
        job = {"do": "ours", "shape": shape, "precision": precision, "engine": engine}
        yield Case(name, "ours", job)


def _evaluated(shape: str) -> Case:
    job = {"do": "ours", "shape": shape, "precision": "fp32", "engine": "auto", "evaluate": True}
    return Case(f"{shape}/fp32/ours-evaluated", "ours", job)


def _hand(shape: str, precision: str, sides: tuple[str, ...]) -> Iterator[Case]:
    for side in sides:
        job = {"do": "hand", "shape": shape, "precision": precision, "side": side}
        limit = LIMIT
        if side == "compile":
            limit = COMPILE_LIMIT
        yield Case(f"{shape}/{precision}/hand-{side}", "hand", job, limit)


def _peers(shape: str, *peers: str) -> Iterator[Case]:
    for peer in peers:
        job = {"shape": shape, "peer": peer}
        yield Case(f"{shape}/fp32/{peer}", "peers", job, PEER_LIMITS[peer])


def chosen(cases: list[Case], only: list[str]) -> list[Case]:
    """Returns the cases whose names begin with, or match, one of some patterns; all without any."""
    if not only:
        return cases
    return [case for case in cases if any(_matches(case.name, pattern) for pattern in only)]


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}/") or fnmatchcase(name, pattern)
