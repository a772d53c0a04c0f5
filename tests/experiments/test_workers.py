"""How many runs take place side by side, and on which GPU."""

import os
import time

import pytest
import torch

from pfl.experiments import room
from pfl.experiments.grid import Job
from pfl.experiments.jobs import room_for
from pfl.experiments.room import VISIBLE, Known, Room, Used, learned, places, used_memory
from pfl.experiments.workers import side_by_side
from pfl.machine import RUNS_HERE, RUNS_ON_CARD

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cores", "memory", "tasks", "fit", "bound"),
    [
        (4, 64, 60, 4, "cores: 4"),
        (4, 64, 3, 3, "their number"),
        (16, 12, 60, 6, "memory: 12 GiB free, up to 2 GiB a run"),
        (16, 1, 60, 1, "memory: 1 GiB free, up to 2 GiB a run"),
        (1, 64, 60, 1, "cores: 1"),
    ],
)
def test_runs_fit_by_cores_and_memory(monkeypatch, cores, memory, tasks, fit, bound):
    """A run may take 2 GiB: 12 GiB, which a full page cache does not lessen, hold six."""
    monkeypatch.setattr(room, "free_cores", lambda: cores)
    monkeypatch.setattr(room, "free_memory", lambda: memory * GIB)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)  # of the machine, not of the container
    fits = Room(tasks)
    assert fits.places == ({None: fit}, bound)
    runs = "runs"
    if fit == 1:
        runs = "run"
    assert str(fits) == f"{fit} {runs} at a time, bounded by {bound}"


def test_the_largest_run_so_far_says_how_many_fit():
    """By 1.25 times its memory: of 12 GiB a run of 0.8 GiB leaves room for 12, one of 4 for 2."""
    known = Known(tasks=60, cores=16, memory=12 * GIB)
    small = learned(known, Used(int(0.8 * GIB)))
    assert places(small).on == {None: 12}
    large = learned(small, Used(4 * GIB))
    assert places(large) == ({None: 2}, "memory: 12 GiB free, up to 5 GiB a run")
    assert learned(large, Used(1 * GIB)) == large


@pytest.mark.parametrize(
    ("cards", "used", "on"),
    [
        # 1.25 * 4 + 1 = 6 GiB a run: 13 of 79 GiB, of which there are cores for 8.
        ("0", [Used(GIB, 4 * GIB, 79 * GIB, "0")], {"0": 8}),
        ("0", [Used(GIB, 12 * GIB, 79 * GIB, "0")], {"0": 4}),  # 16 GiB a run
        ("0", [Used(GIB, 60 * GIB, 79 * GIB, "0")], {"0": 1}),  # more than the GPU has
        # The other GPU keeps one run until one has ended there, too.
        ("01", [Used(GIB, 12 * GIB, 79 * GIB, "0")], {"0": 4, "1": 1}),
        # Somebody else is on the second GPU.
        (
            "01",
            [Used(GIB, 12 * GIB, 79 * GIB, "0"), Used(GIB, 1, 33 * GIB, "1")],
            {"0": 4, "1": 2},
        ),
        # A second run on a GPU sees less of it, since it was not alone.
        (
            "0",
            [Used(GIB, 12 * GIB, 79 * GIB, "0"), Used(GIB, 1, 33 * GIB, "0")],
            {"0": 4},
        ),
        # 40 GiB of the machine's memory hold 2 runs, which are dealt out.
        ("01", [Used(16 * GIB, GIB, 79 * GIB, "0")], {"0": 1, "1": 1}),
        ("01", [Used(GIB)], {"0": 1, "1": 1}),  # a run on the CPU says nothing of GPUs
    ],
)
def test_a_card_has_as_many_runs_as_its_memory_holds(cards, used, on):
    known = Known(tasks=60, cores=8, memory=40 * GIB, cards=list(cards))
    assert places(known).on == dict.fromkeys(cards, 1)
    for one in used:
        known = learned(known, one)
    assert places(known).on == on


def test_runs_on_cards_are_dealt_out():
    """There are cores for 6 of the 4 + 4 runs that the GPUs hold."""
    known = Known(60, 6, 400 * GIB, ["0", "1"], GIB, 10 * GIB, {"0": 40 * GIB, "1": 40 * GIB})
    assert places(known) == ({"0": 3, "1": 3}, "cores: 6")


def test_what_a_run_has_used_of_a_card(monkeypatch):
    monkeypatch.setenv(VISIBLE, "3")
    monkeypatch.setattr(room, "peak_memory", lambda: 7)
    assert used_memory() == Used(7)
    found = {"is_available": True, "is_initialized": True, "memory_reserved": 20}
    found |= {"mem_get_info": (100, 1000), "max_memory_reserved": 30}
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert used_memory() == Used(7, 30, 100 + 20 + GIB, "3")


@pytest.fixture
def four_cards(monkeypatch):
    """Four GPUs that are made up, on a machine with two cores."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(room, "free_cores", lambda: 2)
    monkeypatch.setattr(room, "free_memory", lambda: 64 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def job(**trainer):
    return Job("A", {}, 0, {"trainer": trainer} if trainer else {})


@pytest.mark.usefixtures("four_cards")
@pytest.mark.parametrize(
    ("jobs", "asked", "on"),
    [
        ([job()] * 9, None, {"0": 1, "1": 1, "2": 1, "3": 1}),
        ([job(devices=1)] * 3, None, {"0": 1, "1": 1, "2": 1}),
        ([job()] * 9, 6, {"0": 2, "1": 2, "2": 1, "3": 1}),
        ([job(), job(accelerator="cpu")], None, {"0": 1, "1": 1}),
        ([job(devices=2)] * 9, None, {None: 1}),
        ([job(), job(devices="auto")], None, {None: 1}),
        ([job(devices=2)] * 9, 2, {None: 2}),
        ([job(accelerator="cpu")] * 9, None, {None: 2}),
    ],
)
def test_each_card_has_a_run(jobs, asked, on):
    assert room_for(jobs, len(jobs), asked).places.on == on


@pytest.mark.usefixtures("four_cards")
def test_cards_have_the_names_that_the_user_has_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv(VISIBLE, "5,GPU-a1b2")
    assert room_for([job()] * 9, 9).places.on == {"5": 1, "GPU-a1b2": 1}


def test_what_the_user_asks_for_stays():
    asked = Room(60, 3)
    assert not asked.note(Used(1 << 60)) and asked.places.on == {None: 3}


def facts(number: int) -> list[str | None]:
    """Stands in for a run, which takes longer on the GPU "5"; returns what its process is told."""
    card = os.environ.get(VISIBLE)
    if card == "5":
        time.sleep(5)
    told = [os.environ.get(name) for name in (RUNS_HERE, RUNS_ON_CARD)]
    return [card, *told, str(torch.get_num_threads())]


@pytest.mark.slow
@pytest.mark.processes
def test_each_process_sees_its_card_and_how_many_share_it(monkeypatch):
    """Four cores: two for each of the first two runs; one once the second GPU has three runs."""
    monkeypatch.setenv(VISIBLE, "5,7")
    monkeypatch.setattr(room, "free_cores", lambda: 4)
    monkeypatch.setattr(room, "free_memory", lambda: 64 * GIB)
    fits = Room(7, None, ["5", "7"])
    seen = []
    for _, one in side_by_side(facts, range(7), fits):
        seen.append(one)
        if one == ["7", "2", "1", "2"]:  # 30 GiB hold three times 1.25 * 7 + 1 GiB
            assert fits.note(Used(GIB, 7 * GIB, 30 * GIB, "7"))
    assert os.environ[VISIBLE] == "5,7"
    assert fits.places.on == {"5": 1, "7": 3}
    assert seen.count(["7", "2", "1", "2"]) == 1
    assert ["5", "2", "1", "2"] in seen and seen.count(["7", "4", "3", "1"]) >= 3
    assert len(seen) == 7
