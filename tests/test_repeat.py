"""`benchmarks.repeat --nightly`: a published run again, to its last round and its last digit."""

import copy

import pytest
import yaml

from benchmarks import published, repeat
from pfl.errors import ConfigError
from tests.commands import call, table
from tests.experiments.test_reproduce import TINY

pytestmark = pytest.mark.cli
NAME = "tiny.yaml"


@pytest.fixture(scope="module")
def published_rows(tmp_path_factory):
    """The rows of a published file of four runs, two of them of a run that diverges."""
    folder = tmp_path_factory.mktemp("published")
    content = copy.deepcopy(TINY)
    content["runs"].pop("alone")
    content["panels"] = [{"y": "test/global/loss"}]
    content["seeds"] = 1
    (folder / NAME).write_text(yaml.safe_dump(content, sort_keys=False))
    words = ["--jobs", "1", "--out", folder / "out"]
    assert call("reproduce", folder / NAME, *words)[0] == 0
    return folder, table(folder / "out" / "tiny.csv")


@pytest.fixture
def file(published_rows, monkeypatch):
    """These rows, as `benchmarks.published` gives them by the name of the file."""
    folder, made = published_rows
    monkeypatch.chdir(folder)
    rows = [dict(row) for row in made]
    monkeypatch.setattr(published, "rows", lambda name: [dict(row) for row in rows])
    return rows


def test_the_day_picks_the_run_and_every_run_has_its_turn(file):
    """FedAvg with 1 and 2 steps for two rounds, and both that end in their first round."""
    nights = [repeat.night(NAME, day, 100) for day in range(4)]
    places = {tuple(row[key] for key in ("run", "local_steps", "seed")) for row in file}
    assert [line.split(" | ")[1] for line, _ in nights] == [", ".join(p) for p in sorted(places)]
    assert [wrong for _, wrong in nights] == [[], [], [], []]
    assert [line.split(" | ")[2:4] for line, _ in nights][:2] == [["2", "2"]] * 2
    assert repeat.night(NAME, 4, 100)[0] == nights[0][0]


def test_one_digit_in_the_last_round_is_seen(file, monkeypatch, capsys):
    last = [row for row in file if row["run"] == "FedAvg" and row["local_steps"] == "1"][-1]
    right = last["test/global/loss"]
    last["test/global/loss"] = f"{float(right) * (1 + 2e-6):.7g}"
    monkeypatch.setattr("sys.argv", ["repeat", NAME, "--nightly", "--day", "0"])
    with pytest.raises(SystemExit) as ended:
        repeat.main()
    given = last["test/global/loss"]
    assert ended.value.code == f"{NAME}: round 2, test/global/loss: {right} for {given}"
    assert f"| {NAME} | FedAvg, 1, 0 | 2 | 2 |" in capsys.readouterr().out


def test_a_file_without_runs_of_its_own_is_refused(file, monkeypatch):
    monkeypatch.setattr(repeat.published, "rows", lambda name: [{**file[0], "run": "FedProx"}])
    with pytest.raises(ConfigError, match=r"tiny\.yaml: has no runs of its file"):
        repeat.night(NAME, 0, 100)
