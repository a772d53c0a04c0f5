"""What an experiment tells while its runs take place."""

import io
import os
import sys
import time

import pytest

from pfl.experiments import progress
from pfl.experiments.progress import Expected, Watch, latest_numbers
from tests.commands import call
from tests.experiments.test_compare import comparison


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def runs(tmp_path):
    """Four runs of ten rounds, of which the first has ended before."""
    expected = [Expected.of(n, tmp_path / n, {"trainer": {"max_epochs": 10}}) for n in "ABCD"]
    for run in expected:
        run.folder.mkdir()
    write(tmp_path / "A", 10)
    (tmp_path / "A" / "outcome.json").write_text("{}")
    os.utime(tmp_path / "A" / "outcome.json", (1, 1))
    return expected


def write(folder, rounds, score=0.5):
    lines = [f"{number},{score},\n" for number in range(1, rounds + 1)]
    head = "round,val/personalized/accuracy,test/global/accuracy\n"
    (folder / "metrics.csv").write_text(head + "".join(lines))


def watched(runs, terminal, monkeypatch, change):
    """What a `Watch` has written after a change that happened while it watched."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    with Watch(runs, {runs[0].folder}) as watch:
        watch._since -= 1  # the clock of files is coarse
        watch._begun -= 600
        change()
        watch.tell()
    return terminal.getvalue()


def test_without_a_terminal_a_line_has_runs_rounds_score_and_time_left(runs, monkeypatch):
    """B has ended, and C has been through two of its ten rounds: twelve rounds of 30 that were to
    be made took ten minutes, so that the other 18 take 15."""

    def change():
        write(runs[1].folder, 10)
        (runs[1].folder / "outcome.json").write_text("{}")
        write(runs[2].folder, 2, 0.75)

    line = watched(runs, io.StringIO(), monkeypatch, change)
    score = "val personalized accuracy 0.7500"
    assert line == f"[2/4] C: round 2 of 10, {score}, about 15 min left\n"


def test_the_latest_of_several_runs_is_shown(runs, monkeypatch):
    def change():
        write(runs[2].folder, 3)
        write(runs[3].folder, 4)
        os.utime(runs[3].folder / "metrics.csv", (time.time() - 0.5,) * 2)

    assert "[1/4] C: round 3 of 10" in watched(runs, io.StringIO(), monkeypatch, change)


def test_before_the_first_round_nothing_is_known(runs, monkeypatch):
    line = watched(runs, io.StringIO(), monkeypatch, lambda: None)
    assert line == "[1/4] no round has ended\n"


@pytest.mark.parametrize(
    ("ended", "line"),
    [("B", "[2/4] no round of the others has ended, about 20 min left\n"),  # ten of 30 in ten
     ("BCD", "[4/4] all have ended\n")],
)  # fmt: skip
def test_runs_that_have_ended_are_not_without_rounds(ended, line, runs, monkeypatch):
    def change():
        for run in runs:
            if run.label in ended:
                write(run.folder, 10)
                (run.folder / "outcome.json").write_text("{}")

    assert watched(runs, io.StringIO(), monkeypatch, change) == line


def test_a_terminal_has_a_bar(runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    shown = watched(runs, Terminal(), monkeypatch, lambda: write(runs[1].folder, 5))
    last = shown.split("\r")
    assert any("[1/4]|" in part and "B: round 5 of 10, val personal" in part for part in last)


def test_the_latest_numbers_are_those_of_whole_lines(tmp_path):
    """Round 2 was not evaluated, so that the score is that of round 1."""
    path = tmp_path / "metrics.csv"
    assert latest_numbers(path) == {}
    path.write_text("round,a,b\n")
    assert latest_numbers(path) == {}
    path.write_text("round,a,b\n1,0.5,3\n2,0.25,\n3,0.1")
    assert latest_numbers(path) == {"round": 2, "a": 0.25, "b": 3}
    path.write_text("round,a\n" + "".join(f"{n},{n / 2}\n" for n in range(1, 20_001)))
    assert path.stat().st_size > progress.TAIL
    assert latest_numbers(path) == {"round": 20_000, "a": 10_000}


@pytest.mark.usefixtures("quick_figures")
def test_a_comparison_in_a_log_file_is_not_silent(tmp_path, monkeypatch):
    """`call` has no terminal; a minute lasts 5 ms here."""
    monkeypatch.setattr(progress, "MINUTE", 0.005)
    path = comparison(tmp_path, seeds=1)
    status, out, err = call("compare", path, "--out", tmp_path / "out", "--jobs", "1")
    assert status == 0 and "[1/" in out
    lines = [line for line in err.splitlines() if ": round " in line]
    assert lines and all(line.startswith("[") and " accuracy " in line for line in lines)


def test_a_page_has_every_run_and_reloads_until_all_has_ended(runs, tmp_path, monkeypatch):
    """Of B's ten rounds two took ten minutes: the other 28 of three runs take 140."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    page = tmp_path / "<out>" / "live.html"
    page.parent.mkdir()
    runs[2] = Expected("C & co", runs[2].folder, 10)
    with Watch(runs, {runs[0].folder}, page=page) as watch:
        watch._since -= 1
        watch._begun -= 600
        write(runs[1].folder, 2, 0.75)
        watch.write_page()
        text = page.read_text()
    assert "<h1>&lt;out&gt;</h1>" in text and "<td>C &amp; co</td><td>0 of 10</td>" in text
    assert "1 of 4 runs have ended, about 2 h left" in text  # 140 minutes
    assert "<td>B</td><td>2 of 10</td>" in text and "val personalized accuracy 0.7500" in text
    assert "<td>A</td><td>10 of 10</td>" in text
    assert 'http-equiv="refresh"' in text
    assert 'http-equiv="refresh"' not in page.read_text()


def test_a_run_that_ended_early_has_the_rounds_that_it_made(runs, tmp_path, monkeypatch):
    """B stopped after four of ten rounds and C diverged in its third; D never begins.

    Of the thirty rounds that A had not made, D's ten are left, and the other two runs took ten
    minutes for their twenty: five minutes. Once the command has ended, nothing is left.
    """
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    page = tmp_path / "live.html"
    with Watch(runs, {runs[0].folder}, page=page) as watch:
        watch._since -= 1
        watch._begun -= 600
        write(runs[1].folder, 4)
        (runs[1].folder / "outcome.json").write_text('{"status": "finished"}')
        write(runs[2].folder, 2)
        (runs[2].folder / "outcome.json").write_text('{"status": "diverged"}')
        watch.write_page()
        text = page.read_text()
    assert "<td>B</td><td>4 of 10, ended early</td>" in text
    assert "<td>C</td><td>2 of 10, diverged</td>" in text
    assert "<td>A</td><td>10 of 10</td>" in text and "<td>D</td><td>0 of 10</td>" in text
    assert "3 of 4 runs have ended, about 5 min left" in text
    assert "3 of 4 runs have ended<" in page.read_text()


@pytest.mark.usefixtures("quick_figures")
def test_live_writes_the_page_beside_the_runs(tmp_path):
    path = comparison(tmp_path, seeds=1)
    status, out, err = call("compare", path, "--out", tmp_path / "out", "--jobs", "1", "--live")
    assert status == 0, err
    page = tmp_path / "out" / "live.html"
    assert f"{page} shows how far the runs are" in out
    text = page.read_text()
    ended = text.partition(" runs have ended<")[0].rpartition(">")[2].split(" of ")
    assert ended[0] == ended[1] and text.count("<progress") == int(ended[0]) > 1
    assert "http-equiv" not in text and "src=" not in text  # nothing is fetched


def test_folders_of_finished_runs_have_no_page(tmp_path):
    status, _, err = call("compare", tmp_path, "--live")
    assert status == 2 and "compare: --live: folders of finished runs do not take it" in err
