"""Records that W&B gets, read from the file of an offline run."""

import json
import struct

import pytest
import wandb
import yaml
from wandb.proto import wandb_internal_pb2

from pfl.cli import main
from pfl.cli.messages import explain
from tests.commands import ROOT, elsewhere

CONFIGS = [
    f"--config={ROOT / 'configs' / name}" for name in ("quickstart.yaml", "logger/wandb.yaml")
]
ROUNDS = 3


def read_records(path):
    """Yields the records of a `.wandb` file: protobuf messages after a header.

    The format is LevelDB's log format. Blocks of 32 KiB hold fragments: checksum (4 bytes), length
    (2), type (1), data; a fragment is whole (1) or the first (2), a middle (3) or the last (4)
    part of a record.
    """
    data, block, place, parts = path.read_bytes(), 32768, 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        if kind == 0:
            break
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def values(items):
    """Returns items with nested keys as nested dicts."""
    result: dict = {}
    for item in items:
        *path, last = item.nested_key or [item.key]
        inner = result
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = json.loads(item.value_json)
    return result


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """A run's folder, the folder of its W&B files, and the records that W&B got."""
    root, cwd = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cwd")
    with elsewhere(cwd) as patch:
        patch.setenv("WANDB_MODE", "offline")
        for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
            patch.setenv(f"WANDB_{name}_DIR", str(tmp_path_factory.mktemp(name)))
        small = ("--data.num_clients=6", "--data.partition.alpha=1.0", "--model.local_epochs=1")
        trainer = (f"--trainer.max_epochs={ROUNDS}", f"--trainer.default_root_dir={root}")
        logger = f"--trainer.logger.init_args.save_dir={root}"
        cpu = "--trainer.accelerator=cpu"
        try:
            status = main(["fit", *CONFIGS, *small, *trainer, logger, cpu])
        finally:
            wandb.finish()
            wandb.teardown()  # the file is whole when the process that writes it has ended
        assert status == 0
    (path,) = root.glob("wandb/offline-run-*/run-*.wandb")
    return root / "quickstart", path.parent, list(read_records(path))


@pytest.fixture(scope="module")
def history(sent):
    """The logged rows, each a dict by name."""
    return [
        values(record.history.item)
        for record in sent[2]
        if record.WhichOneof("record_type") == "history"
    ]


def test_everything_is_in_the_folder_of_runs(sent):
    folder, _, _ = sent
    assert {path.name for path in folder.parent.iterdir()} == {"quickstart", "wandb"}
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
    assert {m.step_metric for m in metrics if m.name} <= {"", "round"}


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
    ((name, entry),) = tables(row).items()
    assert "client" in name and row["round"] == ROUNDS and entry["nrows"] == 6
    table = json.loads((sent[1] / "files" / entry["path"]).read_text())
    lines = (sent[0] / "clients.csv").read_text().splitlines()
    assert table["columns"] == lines[0].split(",")
    for cells, line in zip(table["data"], lines[1:], strict=True):
        assert [float(v) for v in cells] == pytest.approx([float(v) for v in line.split(",")])
    # A curve with the table's name would hide the table.
    assert name not in (sent[0] / "metrics.csv").read_text().splitlines()[0].split(",")


def test_summary_has_the_final_numbers(sent):
    summary: dict = {}
    for record in sent[2]:
        summary |= values(record.summary.update)
    expected = json.loads((sent[0] / "summary.json").read_text())
    for name in ("test/global/accuracy", "test/personalized/accuracy", "comm/uplink_bytes"):
        assert summary[name] == pytest.approx(expected[name])
    for name in ("round", "partition_hash", "protocol", "local/accuracy", "gained", "seed"):
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
