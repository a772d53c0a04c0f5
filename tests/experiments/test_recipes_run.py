"""The recipes of the papers from the command line, in a tiny version on digits."""

from pathlib import Path

import pytest

from pfl.configuration.files import find
from pfl.experiments import Reproduction, comparison_of
from tests.commands import call

pytestmark = pytest.mark.cli


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_a_table_runs_in_a_tiny_version_on_digits():
    """The recipe needs two image data sets, which one change replaces; each cell has a number."""
    changes = [
        "trainer.max_epochs=1",
        "trainer.check_val_every_n_epoch=1",
        "data={class_path: DigitsDataModule, init_args: {num_clients: 4}}",
        "model.init_args.network={class_path: MLP, init_args: {in_features: 64, hidden: [4]}}",
        "loop.clients_per_round=2",
    ]
    words = [word for change in changes for word in ("--change", change)]
    status, _, err = call("reproduce", "fedacs-table1", "--out", "out", "--jobs", "1", *words)
    assert status == 0, err
    lines = Path("out/fedacs-table1.md").read_text().splitlines()
    for label in ("Local", "Ditto-P", "Per-FedAvg-P", "Ditto-G", "Per-FedAvg-G"):
        (row,) = [line.strip("| ").split(" | ") for line in lines if line.startswith(f"| {label} ")]
        assert len(row) == 3 and all(0 <= float(cell) <= 100 for cell in row[1:])


def test_compare_takes_a_recipe():
    """The runs that the recipe shows, without those that its base has beside them."""
    file = comparison_of(find("papers/fedslr/figure3"), [{"trainer": {"max_epochs": 3}}])
    figure = Reproduction.from_file("fedslr-figure3")
    assert (file.name, file.baseline, file.title) == (figure.name, "FedAvg", figure.title)
    assert [str(job) for job in file.jobs()] == [str(job) for job in figure.jobs()]
    assert {job.config["trainer"]["max_epochs"] for job in file.jobs()} == {3}
    table = comparison_of(find("papers/fedslr/table3"))
    assert {job.run for job in table.jobs()} == {table.baseline} == {"FedSLR"}


def test_missing_files_of_leaf_are_named():
    status, _, err = call("reproduce", "fedpd-figure6", "--out", "out", "--jobs", "1")
    assert status == 2 and err.count("\n") == 1
    assert "'data/leaf' has no file data/femnist/data/train/*.json" in err
