"""Tables and figures of a comparison in W&B, read from the file of an offline run."""

import json

import pytest
import wandb
import yaml

from pfl.experiments import Results
from pfl.report.table import Table, markdown
from tests.cli.configurations import SMALL, changed
from tests.commands import call
from tests.refusal import refused
from tests.wandb_records import offline, read_records, rows_of

pytestmark = [pytest.mark.cli, pytest.mark.slow]


def test_a_comparison_is_a_run_of_its_own(tmp_path, tmp_path_factory):
    common = changed(SMALL, "loop.metrics", [{"class_path": "torchmetrics.AUROC"}])
    del common["seed_everything"]
    settings = {"task": "multiclass", "num_classes": 10, "average": "weighted"}
    common["loop"]["metrics"][0]["init_args"] = settings
    runs = {"slow": {"model": {"init_args": {"lr": 0.01}}}, "fast": {}}
    path, out = tmp_path / "two.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump({"seeds": 1, "common": common, "runs": runs}))
    with offline(tmp_path, tmp_path_factory.mktemp("cwd"), tmp_path_factory.mktemp):
        status, _, err = call("compare", path, "--jobs=1", f"--out={out}", "--wandb=mine")
    assert status == 0, err
    (file,) = out.glob("wandb/offline-run-*/run-*.wandb")
    records = list(read_records(file))
    (about,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert (about.project, about.job_type) == ("mine", "compare")
    (row,) = [row for row in rows_of(records) if "scores" in row]
    written = (out / "comparison.md").read_text().replace("**", "")  # W&B has no bold cells
    for name in ("scores", "statistics"):
        content = json.loads((file.parent / "files" / row[name]["path"]).read_text())
        assert markdown(Table(content["columns"], content["data"])) in written
    assert "| auroc |" in written
    image = file.parent / "files" / row["curves"]["path"]
    assert image.read_bytes().startswith(b"\x89PNG")


def test_each_run_of_a_comparison_is_a_run_of_wandb(tmp_path, tmp_path_factory):
    """Also where one process makes several of them."""
    common = {key: value for key, value in SMALL.items() if key != "seed_everything"}
    logger = {"class_path": "WandbLogger", "init_args": {"project": "p", "save_dir": str(tmp_path)}}
    common = changed(common, "trainer.logger", logger)
    path, out = tmp_path / "two.yaml", tmp_path / "out"
    runs = {"slow": {"model": {"init_args": {"lr": 0.01}}}, "fast": {}}
    path.write_text(yaml.safe_dump({"seeds": 1, "common": common, "runs": runs}))
    with offline(tmp_path, tmp_path_factory.mktemp("cwd"), tmp_path_factory.mktemp):
        status, _, err = call("compare", path, "--jobs=1", f"--out={out}")
    assert status == 0, err
    names = set()
    for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb"):
        records = list(read_records(file))
        (name,) = {r.run.display_name for r in records if r.WhichOneof("record_type") == "run"}
        names.add(name)
        losses = [row for row in rows_of(records) if "train/loss" in row]
        assert [row["round"] for row in losses] == [1, 2]
    assert names == {f"{out.as_posix()}/{run}/seed0" for run in runs}


def test_without_a_login_one_line_says_what_to_do(tmp_path, monkeypatch):
    def init(**kwargs):
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", init)
    with refused("compare: --wandb: No API key configured.", "WANDB_MODE=offline"):
        Results([]).send("mine", [tmp_path / "comparison.md"])
