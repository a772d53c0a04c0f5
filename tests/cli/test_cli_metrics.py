"""The command line: metrics by class path, their scores in the files, and errors about them."""

import json

import numpy as np
import pytest

from tests.cli.configurations import SMALL, assert_refused, changed, write
from tests.commands import call, table

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("here")]

F1 = {"class_path": "MulticlassF1Score", "init_args": {"num_classes": 10}}
AUROC = {
    "class_path": "torchmetrics.AUROC",
    "init_args": {"task": "multiclass", "num_classes": 10, "average": "weighted"},
}


def test_metrics_are_in_all_files_and_in_the_printed_table(tmp_path):
    config = changed(SMALL, "loop.metrics", [F1, AUROC])
    config = changed(config, "data.init_args.partition.init_args.alpha", 0.1)
    config = changed(config, "trainer.callbacks", [{"class_path": "LocalBaseline"}])
    root = f"--trainer.default_root_dir={tmp_path}"
    status, out, err = call("fit", "--config", write(tmp_path / "c.yaml", config), root)
    assert (status, err) == (0, "")
    clients, summary = table(tmp_path / "small/clients.csv"), tmp_path / "small/summary.json"
    numbers = json.loads(summary.read_text())
    for name in ("f1_score", "auroc"):
        column = np.array([float(row[f"test/global/{name}"]) for row in clients])
        have = column[~np.isnan(column)]
        assert 0 < len(have) <= 6 and have.min() >= 0 and have.max() <= 1
        last = table(tmp_path / "small/metrics.csv")[-1]
        assert float(last[f"test/global/{name}"]) == pytest.approx(have.mean())
        assert float(last[f"test/global/{name}_clients"]) == len(have)
        assert numbers[f"test/global/{name}"] == pytest.approx(have.mean())
        median = numbers["distribution"][f"test/global/{name}"]["q50"]
        assert median == pytest.approx(np.median(have))
        lines = [line.split() for line in out.splitlines()]
        assert ["test", name, "mean", "std", "worst", "10%", "clients"] in lines
        worst = [f"{float(last[f'test/global/{name}{x}']):.4f}" for x in ("", "_std", "_worst10")]
        assert ["global", *worst, str(len(have))] in lines
        assert f"test/local/{name}" in numbers and f"test/local/{name}" in clients[0]
    assert {"gini", "q50"} <= numbers["distribution"]["test/global/accuracy"].keys()
    # The saved configuration repeats the run.
    again = call("fit", "--config", tmp_path / "small/config.yaml", "--trainer.name=again", root)
    assert again[0] == 0
    assert table(tmp_path / "again/clients.csv") == clients


def test_metrics_can_be_named_by_the_keys_of_a_mapping(tmp_path):
    config = changed(SMALL, "loop.metrics", {"micro": F1, "area": AUROC})
    given = ("--config", write(tmp_path / "c.yaml", config), "--trainer.max_epochs=1")
    status, _, err = call("fit", *given, f"--trainer.default_root_dir={tmp_path}")
    assert (status, err) == (0, "")
    row = table(tmp_path / "small/clients.csv")[0]
    assert {"test/global/micro", "test/global/area"} <= row.keys()


@pytest.mark.parametrize(
    "metrics, words",
    [
        (["MulticlassF1"], ["loop.metrics", "no class 'MulticlassF1'"]),
        (["MulticlassF1Score"], ["loop.metrics", "num_classes"]),
        ([{**F1, "init_args": {"num_classes": 9}}], ["[2, 10]"]),
        (["R2Score"], ["loop.metrics: R2Score cannot compare predictions [2, 10]"]),
        (3, ["loop.metrics: 3; it must be one of list[", "dict["]),
    ],
)
def test_mistakes_get_one_line(tmp_path, metrics, words):
    config = changed(SMALL, "loop.metrics", metrics)
    assert_refused(tmp_path, words, "fit", "--config", write(tmp_path / "c.yaml", config))
