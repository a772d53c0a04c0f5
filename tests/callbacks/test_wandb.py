"""Records that W&B gets, read from the file of an offline run."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import wandb
import yaml

from pfl.cli import main
from pfl.configuration.messages import explain
from pfl.scores.table import ScoreTable
from tests.cli.configurations import SMALL, changed
from tests.commands import ROOT, table
from tests.wandb_records import offline, read_records, rows_of, values

CONFIGS = [
    f"--config={ROOT / 'configs' / name}" for name in ("quickstart.yaml", "logger/wandb.yaml")
]
ROUNDS = 3


def fit(root, *args):
    """Runs `fit` with a W&B logger, whose files are under `root`."""
    place = f"--trainer.default_root_dir={root}", f"--trainer.logger.init_args.save_dir={root}"
    assert main(["fit", *args, *place, "--trainer.accelerator=cpu"]) == 0


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A run that was resumed: its folder and, for each part, W&B's folder and the records."""
    make = tmp_path_factory.mktemp
    root, best = make("runs"), make("config") / "best.yaml"
    monitor = {"monitor": "val/personalized/accuracy", "mode": "max", "filename": "best"}
    checkpoint = "lightning.pytorch.callbacks.ModelCheckpoint"
    callback = {"class_path": checkpoint, "init_args": monitor}
    best.write_text(yaml.safe_dump({"trainer": {"callbacks+": [callback]}}))
    small = ("--data.num_clients=6", "--data.partition.alpha=1.0", "--model.local_epochs=1")
    parts = []
    for rounds, more in (
        (ROUNDS, []),
        (ROUNDS + 2, [f"--ckpt_path={root}/quickstart/checkpoints/last.ckpt"]),
    ):
        with offline(root, make("cwd"), make):
            fit(root, *CONFIGS, f"--config={best}", *small, f"--trainer.max_epochs={rounds}", *more)
        (path,) = {*root.glob("wandb/offline-run-*/run-*.wandb")} - {path for path, *_ in parts}
        summary = json.loads((root / "quickstart/summary.json").read_text())
        copy = shutil.copytree(root / "quickstart", make("copy") / "quickstart")
        parts.append((path, copy, list(read_records(path)), summary))
        time.sleep(1.1)  # the second is in the name of W&B's folder
    return parts


@pytest.fixture(scope="module")
def sent(both):
    """A run's folder, the folder of its W&B files, and the records that W&B got."""
    path, copy, records, _ = both[0]
    return copy, path.parent, records


@pytest.fixture(scope="module")
def history(sent):
    """The logged rows of the first part."""
    return rows_of(sent[2])


def test_the_files_of_wandb_are_in_the_folder_of_runs(sent):
    folder, wandb_folder, _ = sent
    runs = wandb_folder.parents[1]
    assert {path.name for path in runs.iterdir()} == {"quickstart", "wandb"}
    assert (folder / "checkpoints" / "last.ckpt").is_file()


def test_config_is_the_runs_configuration(sent):
    folder, _, records = sent
    config = {}
    for record in records:
        for update in (record.run.config.update, record.config.update):
            config |= values(update)
    expected = yaml.safe_load((folder / "config.yaml").read_text())
    for name in ("model", "data", "loop", "trainer", "seed_everything"):
        assert config[name] == expected[name]
    assert config["model"]["class_path"].endswith("FedSLR")
    assert config["data"]["init_args"]["num_clients"] == 6
    (project,) = {r.run.project for r in records if r.WhichOneof("record_type") == "run"}
    assert project == "pfl"


def test_rows_are_those_of_the_metrics_file(sent, history):
    rows = (sent[0] / "metrics.csv").read_text().splitlines()
    names = rows[0].split(",")
    assert len(rows) == ROUNDS + 1
    for number, line in enumerate(rows[1:], start=1):
        expected = dict(zip(names, map(float, line.split(",")), strict=True))
        actual: dict[str, float] = {}
        for row in history:
            if row.get("round") == number:
                actual |= row
        for name in names:
            assert actual[name] == pytest.approx(expected[name], rel=1e-6), name
    # A metric without a round could not be drawn against it.
    scores = [row for row in history if any(name.startswith(("train/", "test/")) for name in row)]
    assert scores and all("round" in row for row in scores)


def test_curves_are_drawn_against_rounds(sent):
    metrics = [r.metric for r in sent[2] if r.WhichOneof("record_type") == "metric"]
    stars = [metric for metric in metrics if metric.glob_name == "*"]
    assert stars[-1].step_metric == "round"  # Lightning's own comes before
    assert "round" in {metric.name for metric in metrics}
    # Some versions resolve the star for each name that they meet.
    others = [m for m in metrics if m.name and not m.name.startswith("bytes/")]
    assert {m.step_metric for m in others} <= {"", "round"}


def test_scores_are_drawn_against_bytes_too(sent, history):
    by_bytes = {
        r.metric.name
        for r in sent[2]
        if r.WhichOneof("record_type") == "metric" and r.metric.step_metric == "comm/bytes"
    }
    rows = [row for row in history if "comm/bytes" in row]
    expected = table(sent[0] / "metrics.csv")
    assert len(rows) == len(expected) == ROUNDS
    for row, line in zip(rows, expected, strict=True):
        sent_bytes = float(line["comm/uplink_bytes"]) + float(line["comm/downlink_bytes"])
        assert row["comm/bytes"] == sent_bytes > 0
        for kind in ("global", "personalized"):
            for number in ("accuracy", "loss"):
                value = float(line[f"test/{kind}/{number}"])
                assert row[f"bytes/{kind}/{number}"] == pytest.approx(value)
                assert f"bytes/{kind}/{number}" in by_bytes


def test_every_evaluation_has_a_histogram_over_clients(sent, history):
    scores = ScoreTable.read(sent[0])
    rows = [row for row in history if "clients/test/personalized/accuracy" in row]
    assert [row["round"] for row in rows] == [1, 2, 3]
    for row in rows:
        histogram = row["clients/test/personalized/accuracy"]
        assert histogram["_type"] == "histogram"
        clients = scores.of(row["round"], "test/personalized/accuracy")
        edges = np.array(histogram["bins"]) + np.append(
            np.full(64, -1e-6), 1e-6
        )  # the file has float32
        expected = np.histogram(clients, edges)[0].tolist()
        assert histogram["values"] == expected and sum(expected) == 6


def test_the_partition_is_sent_as_an_image(sent, history):
    (row,) = [row for row in history if "partition" in row]
    assert row["partition"]["_type"] == "image-file"
    file = sent[1] / "files" / row["partition"]["path"]
    assert file.read_bytes().startswith(b"\x89PNG")


def tables(row):
    """Returns the tables in a row, by name."""
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, dict) and value.get("_type") == "table-file"
    }


def test_the_clients_are_sent_as_a_table(sent, history):
    (row,) = [row for row in history if tables(row)]
    assert tables(row).keys() == {"clients", "clients_by_round"} and row["round"] == ROUNDS
    entry = row["clients"]
    assert entry["nrows"] == 6
    content = json.loads((sent[1] / "files" / entry["path"]).read_text())
    lines = (sent[0] / "clients.csv").read_text().splitlines()
    assert content["columns"] == lines[0].split(",")
    for cells, line in zip(content["data"], lines[1:], strict=True):
        assert [float(v) for v in cells] == pytest.approx([float(v) for v in line.split(",")])
    # A curve with the table's name would hide the table.
    assert not tables(row).keys() & table(sent[0] / "metrics.csv")[0].keys()


def test_the_scores_of_all_evaluations_are_a_table(sent, history):
    (row,) = [row for row in history if tables(row)]
    path = sent[1] / "files" / row["clients_by_round"]["path"]
    content = json.loads(path.read_text())
    assert content["columns"][:2] == ["round", "client"] and len(content["data"]) == ROUNDS * 6
    place = content["columns"].index("test/global/loss")
    scores = ScoreTable.read(sent[0])
    for cells in content["data"]:
        expected = scores.of(cells[0], "test/global/loss")[cells[1]]
        assert cells[place] == pytest.approx(expected)


# ---- artifacts -----------------------------------------------------------------------------------


def artifacts(records, kind):
    """Returns the artifacts of a type that a run made."""
    found = (r.request.log_artifact.artifact for r in records)
    direct = (r.artifact for r in records if r.WhichOneof("record_type") == "artifact")
    return [a for a in (*found, *direct) if a.type == kind]


def content_of(artifact, name):
    (entry,) = [e for e in artifact.manifest.contents if e.path == name]
    return Path(entry.local_path)


def test_the_partition_is_an_artifact(both):
    _, folder, records, summary = both[0]
    (artifact,) = artifacts(records, "partition")
    assert artifact.name == f"partition-{summary['partition_hash'][:12]}"
    assert json.loads(artifact.metadata)["hash"] == summary["partition_hash"]
    with np.load(content_of(artifact, "partition.npz")) as arrays:
        sizes = [int(row["train_samples"]) for row in table(folder / "clients.csv")]
        assert arrays["train_sizes"].tolist() == sizes
        all_of = [arrays[f"{split}_indices"] for split in ("train", "val", "test")]
    # The digits are 1797 samples, and each is of one client and one split.
    assert sorted(np.concatenate(all_of)) == list(range(1797))
    assert not artifacts(both[1][2], "partition")  # once in a run


def test_models_are_versions_of_an_artifact(both):
    for _, _, records, summary in both:
        made = artifacts(records, "model")
        aliases = [sorted(artifact.aliases) for artifact in made]
        assert aliases == [["best", "latest"], ["last", "latest"]]
        assert len({artifact.name for artifact in made}) == 1
        for artifact, rounds in zip(
            made, (summary["best"]["round"], summary["round"]), strict=True
        ):
            checkpoint = torch.load(content_of(artifact, "model.ckpt"), weights_only=True)
            assert checkpoint["federated"]["rounds"] == rounds


def test_a_resumed_run_continues_the_same_run(both):
    first, second = ({r.run.run_id for r in part[2] if r.run.run_id} for part in both)
    assert first == second and len(first) == 1
    rows = rows_of(both[1][2])
    assert {row["round"] for row in rows if "test/global/accuracy" in row} == {4, 5}
    assert not [row for row in rows if "partition" in row]


def test_a_collaboration_map_is_sent(tmp_path, tmp_path_factory):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(changed(SMALL, "model.class_path", "FedACS")))
    with offline(tmp_path, tmp_path_factory.mktemp("cwd"), tmp_path_factory.mktemp):
        fit(tmp_path, f"--config={config}", CONFIGS[1])
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = list(read_records(path))
    (row,) = [row for row in rows_of(records) if "collaboration" in row]
    assert row["round"] == 2
    image = path.parent / "files" / row["collaboration"]["path"]
    assert image.read_bytes().startswith(b"\x89PNG")
    # Without a validation score that calls a model the best, the last one is the best or just last.
    (model,) = artifacts(records, "model")
    best = json.loads((tmp_path / "small/summary.json").read_text())["best"]["round"]
    assert sorted(model.aliases) == [*["best"] * (best == 2), "last", "latest"]


def test_summary_has_the_final_numbers(sent):
    summary: dict = {}
    for record in sent[2]:
        summary |= values(record.summary.update)
    expected = json.loads((sent[0] / "summary.json").read_text())
    for name in ("test/global/accuracy", "test/personalized/accuracy", "comm/uplink_bytes"):
        assert summary[name] == pytest.approx(expected[name])
    for name in ("round", "partition_hash", "protocol", "test/local/accuracy", "gained", "seed"):
        assert summary[name] == expected[name], name
    assert summary["best"]["round"] == expected["best"]["round"]
    assert tables(summary)


def test_without_a_login_one_line_names_the_option():
    error = wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")
    line = explain(error)
    assert line is not None and "\n" not in line
    assert line.startswith("trainer.logger: No API key configured. Use `wandb login` to log in.")
    assert line.endswith("--trainer.logger.offline true")
    assert explain(RuntimeError("another")) is None
