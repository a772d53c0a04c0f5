"""How many runs take place side by side, and on which GPU."""

import os

import pytest
import torch

from pfl.experiments import workers
from pfl.experiments.grid import Job
from pfl.experiments.jobs import places_for
from pfl.experiments.workers import VISIBLE, side_by_side, workers_that_fit


@pytest.mark.parametrize(
    ("cores", "memory", "tasks", "fit"),
    [(4, 64, 60, 4), (4, 64, 3, 3), (16, 12, 60, 6), (16, 1, 60, 1), (1, 64, 60, 1)],
)
def test_runs_fit_by_cores_and_memory(monkeypatch, cores, memory, tasks, fit):
    """A run may take 2 GiB: 12 GiB, which a full page cache does not lessen, hold six."""
    monkeypatch.setattr(workers, "free_cores", lambda: cores)
    monkeypatch.setattr(workers, "free_memory", lambda: memory << 30)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)  # of the machine, not of the container
    assert workers_that_fit(tasks) == fit


@pytest.fixture
def four_cards(monkeypatch):
    """Four GPUs that are made up, on a machine with two cores."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(workers, "free_cores", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def job(**trainer):
    return Job("A", {}, 0, {"trainer": trainer} if trainer else {})


@pytest.mark.usefixtures("four_cards")
@pytest.mark.parametrize(
    ("jobs", "asked", "count", "cards"),
    [
        ([job()] * 9, None, 4, "0123"),
        ([job(devices=1)] * 3, None, 3, "0123"),
        ([job()] * 9, 8, 8, "0123"),  # two on each card
        ([job(), job(accelerator="cpu")], None, 2, "0123"),
        ([job(devices=2)] * 9, None, 1, ""),
        ([job(), job(devices="auto")], None, 1, ""),
        ([job(devices=2)] * 9, 2, 2, ""),
    ],
)
def test_each_card_has_a_run(jobs, asked, count, cards):
    assert places_for(jobs, len(jobs), asked) == (count, list(cards))


@pytest.mark.usefixtures("four_cards")
def test_runs_on_the_cpu_leave_cards_alone(monkeypatch):
    monkeypatch.setattr(workers, "free_memory", lambda: 64 << 30)
    assert places_for([job(accelerator="cpu")] * 9, 9) == (2, [])


@pytest.mark.usefixtures("four_cards")
def test_cards_have_the_names_that_the_user_has_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv(VISIBLE, "5,GPU-a1b2")
    assert places_for([job()] * 9, 9) == (2, ["5", "GPU-a1b2"])


@pytest.mark.slow
@pytest.mark.processes
def test_each_process_sees_its_card(monkeypatch):
    """`os.getenv` stands in for a run: it returns the cards that its process sees."""
    monkeypatch.setenv(VISIBLE, "5,7")
    tasks = [VISIBLE] * 2
    seen = [card for _, card in side_by_side(os.getenv, tasks, 2, ["5", "7"])]
    assert sorted(seen) == ["5", "7"] and os.environ[VISIBLE] == "5,7"
