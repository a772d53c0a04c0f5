"""`loop.stages` on the command line, in files and in comparisons: our stages, and a user's own."""

import json

import pytest
import yaml

from tests.cli.configurations import SMALL, changed, write
from tests.commands import call

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("here")]

OWN = """
from dataclasses import replace
from pfl.stages.stage import Stage

class Half(Stage):
    def __init__(self, factor: float = 0.5):
        self.factor = factor

    def sent(self, clients, messages):
        return {
            name: replace(m, values=m.values * self.factor, nbytes=17)
            for name, m in messages.items()
        }
"""
SIZE = 64 * 8 + 8 + 8 * 10 + 10  # of the network: 610 values, whose places have 10 bits
FITS = 2 * 3  # two rounds of three clients


def fit(tmp_path, config, *words):
    """The bytes that clients have sent in a run, and its folder."""
    tmp_path.mkdir(exist_ok=True)
    path = write(tmp_path / "run.yaml", config)
    root = ("--trainer.default_root_dir", tmp_path / "runs")
    status, _, err = call("fit", "--config", path, *root, *words)
    assert status == 0, err
    folder = tmp_path / "runs" / "small"
    rows = (folder / "metrics.csv").read_text().splitlines()
    values = dict(zip(rows[0].split(","), rows[-1].split(","), strict=True))
    return int(float(values["comm/uplink_bytes"])), folder


@pytest.mark.parametrize("way", ["words", "file"])
def test_a_short_name_is_a_stage_of_ours(tmp_path, way):
    """61 values of 4 bytes, and 61 places of 10 bits."""
    config = SMALL
    words = ["--loop.stages+=TopK", "--loop.stages.share=0.1"]
    if way == "file":
        stage = {"class_path": "TopK", "init_args": {"share": 0.1}}
        config = changed(SMALL, "loop.stages", [stage])
        words = []
    sent, folder = fit(tmp_path, config, *words)
    assert sent == FITS * (61 * 4 + 77)
    summary = json.loads((folder / "summary.json").read_text())
    assert "TopK(share=0.1)" in json.dumps(summary)
    again, _ = fit(tmp_path / "again", yaml.safe_load((folder / "config.yaml").read_text()))
    assert again == sent


def test_a_stage_of_ones_own_is_found_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "mystage.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    sent, _ = fit(tmp_path, changed(SMALL, "loop.stages", ["mystage.Half"]))
    assert sent == FITS * 17


MISTAKES = {
    "an argument": (
        [{"class_path": "TopK", "init_args": {"share": 2.0}}],
        "loop.stages: TopK.share: 2.0; it must be positive and at most 1",
    ),
    "no argument": (["TopK"], "share"),
    "a class": (["Topk"], "there is no class 'Topk' here"),
    "no list": ("SignEF", "loop.stages: SignEF; it must be list"),
    "no class": ([{"init_args": {"share": 0.1}}], "loop.stages"),
    "an empty entry": ([{}], "loop.stages"),
    "another class": (["Median"], "loop.stages"),
    "two compressors": (["SignEF", "SignEF"], "leave one of them out"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line(tmp_path, mistake):
    value, words = MISTAKES[mistake]
    path = write(tmp_path / "run.yaml", changed(SMALL, "loop.stages", value))
    status, _, err = call("fit", "--config", path, "--trainer.default_root_dir", tmp_path / "runs")
    assert (status, err.count("\n")) == (2, 1), err
    assert words in err


def test_stages_are_compared(tmp_path, quick_figures):
    config = changed(SMALL, "model", {"init_args": SMALL["model"]["init_args"]})
    del config["seed_everything"]
    del config["trainer"]["name"]
    stages = {
        "none": {"loop.stages": []},
        "signs": {"loop.stages": ["SignEF"]},
        "tenth": {"loop.stages": [{"class_path": "TopK", "init_args": {"share": 0.1}}]},
    }
    comparison = {"seeds": 1, "common": config, "grid": {"stages": stages}}
    comparison["runs"] = {"FedAvg": {"model": {"class_path": "FedAvg"}}}
    path = write(tmp_path / "stages.yaml", comparison)
    status, _, err = call("compare", path, "--out", tmp_path / "out", "--jobs", "1")
    assert status == 0, err
    sent = {}
    for summary in (tmp_path / "out").rglob("summary.json"):
        content = json.loads(summary.read_text())
        stages = summary.parent.parent.name.removeprefix("stages=")
        sent[stages] = content["comm/uplink_bytes"]
    assert sent == {
        "none": FITS * SIZE * 4,
        "signs": FITS * (4 + 77),
        "tenth": FITS * (61 * 4 + 77),
    }
