"""The command for a GPU: its driver, its tables, and that loops by hand do our work."""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.gpu import cases, checks, hand_run, ours, page, peers
from benchmarks.gpu.driver import Driver, read
from benchmarks.gpu.hand import NeedsGPU
from benchmarks.gpu.measuring import planned, union
from benchmarks.gpu.process import Ended, NotReady, Process
from benchmarks.gpu.shapes import SHAPES, shape_of
from tests.sources import ROOT

CPU = torch.device("cpu")
RESULTS = ROOT / "benchmarks" / "results"


class Answers:
    """A worker that answers with what it was asked; the case "bad" ends it."""

    started: list[str]

    def __init__(self, kind, asked):
        self.asked = asked
        self.alive = True
        asked.append(f"start {kind}")

    def ask(self, job, limit):
        self.asked.append(job["do"])
        if job["do"] == "bad":
            self.alive = False
            raise Ended("it is gone")
        return {"ok": True, "ms": 2.0, "min_ms": 1.0}

    def end(self):
        self.asked.append("end")


def some(*names):
    return [cases.Case(name, "ours", {"do": name}) for name in names]


def test_a_case_that_fails_is_written_down_and_the_rest_goes_on(tmp_path):
    asked = []
    driver = Driver(tmp_path, 60, lambda kind: Answers(kind, asked))
    assert driver.run(some("first", "bad", "last")) == 0
    assert asked == ["start ours", "first", "bad", "end", "start ours", "last", "end"]
    lines = read(tmp_path)
    assert [(line["case"], line["ok"]) for line in lines] == [
        ("first", True),
        ("bad", False),
        ("last", True),
    ]
    assert lines[1]["error"] == "it is gone"


def test_cases_with_a_line_are_not_run_again(tmp_path):
    asked = []
    (tmp_path / "cases.jsonl").write_text('{"case": "first", "ok": true}\n{"case": "sec')
    driver = Driver(tmp_path, 60, lambda kind: Answers(kind, asked))
    driver.run(some("first", "second"))
    assert asked == ["start ours", "second", "end"]
    assert [line["case"] for line in read(tmp_path)] == ["first", "second"]


def test_our_weights_are_made_again_once_where_an_earlier_run_left_none(tmp_path):
    """The lines came from another machine, which kept the weights."""
    asked = []
    (tmp_path / "cases.jsonl").write_text('{"case": "W1/fp32/ours", "ok": true}\n')
    driver = Driver(tmp_path, 60, lambda kind: Answers(kind, asked))
    driver.run(cases.chosen(cases.all_cases(peers=False), ["W1/fp32/ours", "W1/fp32/hand-*"]))
    assert [word for word in asked if not word.startswith(("start", "end"))] == [
        "ours",
        *["hand"] * len(cases.HAND),
    ]
    assert len(read(tmp_path)) == 1 + len(cases.HAND)


def test_no_case_begins_after_the_time(tmp_path):
    driver = Driver(tmp_path, -1, lambda kind: Answers(kind, []))
    assert driver.run(some("first", "second")) == 2
    assert read(tmp_path) == []


def test_a_process_that_hangs_or_ends_is_told_from_one_that_answers(tmp_path):
    code = (
        "import sys, time\n"
        "print('{}', flush=True)\n"
        "for line in sys.stdin:\n"
        "    if 'hang' in line: time.sleep(60)\n"
        "    if 'end' in line: sys.exit(3)\n"
        "    print(line, end='', flush=True)\n"
    )
    start = partial(Process, [sys.executable, "-c", code], tmp_path / "log", {}, tmp_path)
    process = start()
    assert process.ask({"do": 1}, 20) == {"do": 1}
    with pytest.raises(Ended, match=r"no answer after 0 s"):
        process.ask({"do": "hang"}, 0.2)
    assert not process.alive
    process = start()
    with pytest.raises(Ended, match="ended with 3"):
        process.ask({"do": "end"}, 20)
    process.end()
    process = Process([sys.executable, "-c", "1 / 0"], tmp_path / "other", {}, tmp_path)
    with pytest.raises(NotReady, match=r"(?s)ended with 1.*division by zero"):
        process.ask({"do": 1}, 20)
    process.end()


def test_names_of_cases_are_unique_and_known():
    everything = cases.all_cases(peers=True)
    names = [case.name for case in everything]
    assert len(names) == len(set(names))
    assert set(cases.CHECKS) == set(checks.CHECKS)
    assert {case.job["shape"] for case in everything if "shape" in case.job} == set(SHAPES)
    assert [c.name for c in cases.chosen(everything, ["W1/tf32"])] == [
        "W1/tf32/ours",
        "W1/tf32/hand-func-graph",
    ]


def test_page_has_shares_of_the_rate_and_says_what_failed_or_was_skipped():
    lines = [
        {"case": "rate/fp32", "ok": True, "operations_s": 4e12},
        {"case": "check/draws", "ok": False, "error": "a | b"},
        {
            "case": "W1/fp32/ours",
            "ok": True,
            "ms": 2.0,
            "min_ms": 1.5,
            "operations_s": 1e12,
            "busy": 0.4,
        },
        {"case": "W1/fp32/hand-graph", "ok": True, "skipped": "needs a GPU"},
    ]
    text = page.markdown(lines)
    assert "0 of 1 checks hold" in text
    assert "| draws | **no** | error a / b |" in text
    assert "| ours | 2.00 (1.50) |  |  | 25.0% |  |  | 40% |" in text
    assert "launch-bound" in text
    assert "needs a GPU |" in text
    assert "Not measured" in page.markdown([])


def test_a_framework_that_did_other_work_has_no_time():
    ours = {"moved": 2.0, "parameters": 10, "samples": 40.0, "work": 3}
    report = {
        "ok": True,
        "first": 1.0,
        "seconds": [0.2, 0.4, 0.3],
        "parameters": 10,
        "moved": 2.05,
        "versions": {},
    }
    line = peers.compared(report, ours)
    assert line["ok"] and line["ms"] == 300 and line["min_ms"] == 200
    assert line["images_s"] == pytest.approx(40 / 0.3)
    assert line["operations_s"] == pytest.approx(3 * 40 / 0.3)
    assert not peers.compared({**report, "moved": 2.2}, ours)["ok"]
    assert not peers.compared({**report, "parameters": 11}, ours)["ok"]


def test_the_packages_of_a_framework_are_found_in_a_folder(tmp_path):
    assert peers.place("fedjax", tmp_path) is None
    (tmp_path / "fedjax").mkdir()
    assert peers.place("fedjax", tmp_path) == tmp_path
    (tmp_path / "site-fedjax" / "fedjax").mkdir(parents=True)
    assert peers.place("fedjax", tmp_path) == tmp_path / "site-fedjax"


def test_intervals_that_overlap_are_counted_once():
    assert union([(10, 20), (15, 30), (40, 45), (41, 43)]) == 25


def test_as_many_rounds_are_timed_as_there_is_time_for():
    assert planned(1.0, 0.25) == 4
    assert planned(1.0, 0.9) == 2  # the least
    assert planned(1.0, 1e-9) == 31  # the most


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A shape with clients of unequal size, and the folder of our weights."""
    shape = shape_of("FLUTE-LR", tiny=True)
    data = shape.data()
    folder = tmp_path_factory.mktemp("weights")
    result = ours.run(shape, data, CPU, seconds=0.0, weights=folder)
    return shape, data, folder, result


def test_our_side_counts_its_rounds_and_samples(trained):
    shape, data, folder, result = trained
    rounds = hand_run.Rounds(shape, data, CPU)
    assert result["rounds"] == 1  # the second, which is longer than no time
    assert result["samples"] == rounds.order(1).samples
    assert result["samples"] == data.client_sizes[rounds.loop.cohort(1)].sum()
    assert {path.name for path in folder.iterdir()} == {"1.pt", "2.pt"}


@pytest.mark.parametrize("side", ["plain", "foreach", "func"])
def test_loops_by_hand_reach_our_weights(trained, side):
    shape, data, folder, _ = trained
    result = hand_run.run(
        side, hand_run.Rounds(shape, data, CPU), seconds=0.0, weights=folder, limit=60.0
    )
    assert result["distance"] < 1e-6
    assert result["rounds"] == 1


@pytest.mark.parametrize("side", ["graph", "func-graph"])
def test_recorded_loops_reach_our_weights(trained, monkeypatch, side):
    """A recording is made up: like a real one it runs the step a few times before."""

    def record(work, device):
        for _ in range(3):
            work()
        return work

    monkeypatch.setattr("benchmarks.gpu.hand.record", record)
    shape, data, folder, _ = trained
    rounds = hand_run.Rounds(shape, data, CPU)
    result = hand_run.run(side, rounds, seconds=0.0, weights=folder, limit=60.0)
    assert result["distance"] < 1e-6


@pytest.mark.parametrize("side", ["graph", "func-graph", "compile"])
def test_sides_that_record_say_that_they_need_a_gpu(trained, side):
    shape, data, folder, _ = trained
    with pytest.raises(NeedsGPU, match="needs a GPU"):
        hand_run.run(side, hand_run.Rounds(shape, data, CPU), weights=folder)


def test_a_loop_that_does_other_work_has_no_time(trained):
    shape, data, folder, _ = trained
    faster = replace(shape, rate=2 * shape.rate)
    with pytest.raises(ValueError, match="from ours"):
        hand_run.run(
            "func", hand_run.Rounds(faster, data, CPU), seconds=0.0, weights=folder, limit=60.0
        )


def test_lines_are_json(tmp_path):
    driver = Driver(tmp_path, 60, lambda kind: Answers(kind, []))
    driver.run(some("first"))
    line = json.loads((tmp_path / "cases.jsonl").read_text())
    assert line["case"] == "first" and line["seconds"] >= 0


def test_the_page_has_the_tables_of_its_data():
    lines = [json.loads(x) for x in (RESULTS / "data" / "gpu-h100.jsonl").read_text().splitlines()]
    tables = page.markdown(lines)
    tables = tables[tables.index("NVIDIA") :].rstrip()
    assert (RESULTS / "gpu.md").read_text().endswith(f"{tables}\n")
