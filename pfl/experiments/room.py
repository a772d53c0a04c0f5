"""How many runs take place beside each other: as many as cores, memory and GPUs have room for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from pfl.machine import free_cores, free_memory, peak_memory

VISIBLE = "CUDA_VISIBLE_DEVICES"
RUN_MEMORY = 2 << 30  # bytes of the machine's memory that count for a run until one has ended
CONTEXT = 1 << 30  # bytes that a process takes of a GPU beside its tensors
MARGIN = 1.25  # a run may take so many times the memory of the largest one before it


class Used(NamedTuple):
    """The memory that a run has taken, in bytes.

    Attributes:
        host: What its process has taken of the machine's memory.
        on_card: What its tensors have taken of a GPU; 0: it had none.
        card_room: What the GPU would have free without this process.
        card: The GPU, as `CUDA_VISIBLE_DEVICES` names it.
    """

    host: int
    on_card: int = 0
    card_room: int = 0
    card: str | None = None


def used_memory() -> Used:
    """Returns the memory that the run of this process has taken."""
    host = peak_memory() or RUN_MEMORY
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return Used(host)
    room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() + CONTEXT
    return Used(host, torch.cuda.max_memory_reserved(), room, os.environ.get(VISIBLE))


@dataclass(frozen=True)
class Known:
    """What is known of the machine and of the runs, in bytes where it is memory.

    Attributes:
        tasks: The number of tasks that make the runs.
        cores: The cores that this process may use.
        memory: The machine's memory that was free at the beginning.
        cards: The GPUs, as `CUDA_VISIBLE_DEVICES` names them; none: runs share no GPUs out.
        need: What a run takes of the machine's memory; None: no run has ended yet.
        card_need: What a run takes of a GPU; None: no run on a GPU has ended yet.
        card_room: What each GPU has free for runs, by name, as far as a run there has ended.
    """

    tasks: int
    cores: int
    memory: int
    cards: Sequence[str] = ()
    need: int | None = None
    card_need: int | None = None
    card_room: Mapping[str, int] = field(default_factory=dict)


class Places(NamedTuple):
    """How many runs take place at the same time on each GPU (None: on none), and what bounds it."""

    on: dict[str | None, int]
    bound: str

    @property
    def total(self) -> int:
        """The number of runs that take place at the same time."""
        return sum(self.on.values())


def places(known: Known) -> Places:
    """Returns how many runs take place at the same time.

    Without GPUs these are as many as there are cores, and as the free memory holds. Each GPU has
    one run until a run there has ended and shows what it takes; then as many as the GPU's memory
    holds, if there are cores for them.

    Example:
        A run takes 5 GiB of a GPU with 24 GiB, and 1 GiB of the 32 GiB of a machine of 16 cores:

        >>> gib = 1 << 30
        >>> places(Known(60, 16, 32 * gib, ["0"], 1 * gib, 5 * gib, {"0": 24 * gib}))
        Places(on={'0': 4}, bound='GPU memory: 24 GiB free, up to 5 GiB a run')
    """
    limits = {"their number": known.tasks}
    each: dict[str | None, int] = {None: known.tasks}
    if known.cards:
        each = dict.fromkeys(known.cards, 1)
        words = f"GPUs: {len(known.cards)}, with one run each until one has ended"
        if known.card_need is not None:
            for card, room in known.card_room.items():
                each[card] = max(1, room // known.card_need)
            least = min(known.card_room.values())
            words = f"GPU memory: {_gib(least)} free, up to {_gib(known.card_need)} a run"
        limits[words] = sum(each.values())
    limits[f"cores: {known.cores}"] = max(known.cores, len(known.cards))
    need = known.need or RUN_MEMORY
    words = f"memory: {_gib(known.memory)} free, up to {_gib(need)} a run"
    limits[words] = known.memory // need
    bound = min(limits, key=lambda words: limits[words])
    return Places(deal(max(1, limits[bound]), each), bound)


def deal(count: int, each: Mapping[str | None, int]) -> dict[str | None, int]:
    """Returns how many of some runs each GPU has if they are dealt out one by one.

    Args:
        count: The number of runs, at most that of all places.
        each: How many each GPU has a place for.

    Example:
        >>> deal(5, {"0": 1, "1": 4, "2": 4})
        {'0': 1, '1': 2, '2': 2}
    """
    dealt = dict.fromkeys(each, 0)
    while count:
        for card in each:
            if count and dealt[card] < each[card]:
                dealt[card] += 1
                count -= 1
    return {card: number for card, number in dealt.items() if number}


def _gib(number: int) -> str:
    return f"{number / 2**30:.3g} GiB"


class Room:
    """The places for the runs of an experiment, which change by what runs show to take.

    Args:
        tasks: The number of tasks that make the runs.
        asked: The number of runs at the same time that the user asks for; None: as many as fit.
        cards: The GPUs that the runs share out, as `CUDA_VISIBLE_DEVICES` names them.

    Attributes:
        places: How many runs take place at the same time.
        most: The largest number of them that there may be later.
        cores: The cores that they share.
    """

    def __init__(self, tasks: int, asked: int | None = None, cards: Sequence[str] = ()) -> None:
        self.cores = free_cores()
        self._known = Known(tasks, self.cores, free_memory(), tuple(cards))
        self._asked = asked
        if asked is None:
            self.most = min(tasks, max(self.cores, len(cards)))
            self.places = places(self._known)
        else:
            self.most = asked
            names: list[str | None] = list(cards) or [None]
            self.places = Places(deal(asked, dict.fromkeys(names, asked)), "--jobs")

    def note(self, used: Used | None) -> bool:
        """Takes in what a run has used; returns whether other numbers of runs fit now."""
        before = self.places.on
        if used is not None and self._asked is None:
            self._known = learned(self._known, used)
            self.places = places(self._known)
        return self.places.on != before

    def __str__(self) -> str:
        runs = "runs"
        if self.places.total == 1:
            runs = "run"
        return f"{self.places.total} {runs} at a time, bounded by {self.places.bound}"


def learned(known: Known, used: Used) -> Known:
    """Returns what is known after one more run."""
    need = max(known.need or 0, round(MARGIN * used.host))
    if used.card not in known.cards:
        return replace(known, need=need)
    card_need = max(known.card_need or 0, round(MARGIN * used.on_card) + CONTEXT)
    # The first run of a GPU was alone there.
    card_room = {str(used.card): used.card_room, **known.card_room}
    return replace(known, need=need, card_need=card_need, card_room=card_room)


def visible_cards() -> list[str]:
    """Returns the GPUs that this process sees, as `CUDA_VISIBLE_DEVICES` names them."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
    else:
        count = 0
    named = os.environ.get(VISIBLE)
    if named:
        names = named.split(",")
    else:
        names = [str(number) for number in range(count)]
    return names[:count]
