"""Runs that are read from folders which are written by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from pfl.scores.names import ScoreName
from pfl.scores.runs import Run, best_round, config_of, cost_of, find_runs, read_runs
from pfl.scores.table import CLIENTS, LOCAL, append_scores
from tests.refusal import refused

METRICS = "round,val/global/loss,test/global/loss\n1,0.5,0.75\n2,0.25,0.5\n3,0.375,0.25\n"
TABLE = "client,name,test/global/loss\n0,Anna,0.5\n1,Bert,\n"
LOSS = ScoreName("test", "global", "loss")


def folder(root, *, metrics=METRICS, summary=None, clients=TABLE, config=None, outcome=None):
    """Writes the files of a run that has ended; None for a file that is not there."""
    root.mkdir(parents=True, exist_ok=True)
    content = {"finished": True} if summary is None else summary
    files = {"metrics.csv": metrics, "summary.json": json.dumps(content), "clients.csv": clients}
    files |= {"config.yaml": config, "outcome.json": outcome and json.dumps(outcome)}
    for name, text in files.items():
        if text is not None:
            (root / name).write_text(text)
    return root


def read(root, **known):
    return Run.read("m", 0, root, **known)


# ---- rounds --------------------------------------------------------------------------------------


def test_the_best_round_is_the_first_of_the_best_validated_ones():
    nan = float("nan")
    rows = [
        {"round": 1, "val/global/loss": nan, "val/global/error": 0.5},
        {"round": 2, "val/global/loss": 0.25, "val/global/error": 0.25},
        {"round": 3, "val/global/error": 0.125},
        {"round": 4, "val/global/loss": 0.25, "val/global/error": 0.75},
    ]
    assert best_round(rows) == {"selected_by": "val/global/loss", **rows[1]}
    chosen = best_round(rows, "error", {"error": False})
    assert chosen == {"selected_by": "val/global/error", **rows[2]}
    assert best_round(rows, "error", {"error": True})["round"] == 4
    assert best_round([{"round": 1, "val/global/loss": nan}]) is None
    assert best_round([{"round": 1, "test/global/loss": 1.0}]) is None


def test_what_a_round_has_cost():
    row = {"round": 3.0, "comm/uplink_bytes": 10.0, "comm/downlink_bytes": 7.0}
    assert cost_of(row, "bytes") == 17
    assert cost_of(row, "rounds") == 3
    assert cost_of(row, "gradients") == 0  # none are recorded


def test_rounds_within_a_budget(tmp_path):
    run = read(folder(tmp_path))
    assert [row["round"] for row in run.within(None)] == [1, 2, 3]
    assert [row["round"] for row in run.within(("rounds", 2.0))] == [1, 2]
    assert run.within(("rounds", 0.5)) == []


def test_the_round_that_counts(tmp_path):
    """The best by validation; without it the last one that was evaluated; none of a failed run."""
    run = read(folder(tmp_path / "a"))
    assert run.selected() == {"selected_by": "val/global/loss", **run.rows[1]}
    assert run.selected(("rounds", 1.0))["round"] == 1
    assert run.selected(("rounds", 0.0)) is None
    assert read(tmp_path / "a", diverged=True).selected() is None
    metrics = "round,test/global/loss,test/global/error\n1,0.5,0.25\n2,0.25,0.5\n3,,\n"
    run = read(folder(tmp_path / "b", metrics=metrics))
    assert run.selected() == {"round": 2, "test/global/loss": 0.25, "test/global/error": 0.5}
    metrics = "round,val/global/loss,val/global/error,test/global/loss\n1,1,0,1\n2,0,1,1\n"
    summary = {"finished": True, "select_by": "error", "higher_is_better": {"error": True}}
    run = read(folder(tmp_path / "c", metrics=metrics, summary=summary))
    assert run.selected()["round"] == 2
    assert run.selected(metric="global/loss")["round"] == 2
    summary["higher_is_better"] = {"error": False}
    run = read(folder(tmp_path / "c", metrics=metrics, summary=summary))
    assert run.selected()["round"] == 1


# ---- files ---------------------------------------------------------------------------------------


def test_empty_cells_are_no_numbers(tmp_path):
    run = read(folder(tmp_path, metrics="round,test/global/loss\n1,\n2,0.5\n"))
    assert run.rows == [{"round": 1.0}, {"round": 2.0, "test/global/loss": 0.5}]


@pytest.mark.parametrize(
    "metrics", ["test/global/loss\n0.5\n", "round,a\n,1\n", "round,a\ninf,1\n"]
)
def test_a_row_without_a_round_is_refused(tmp_path, metrics):
    with refused("metrics.csv: it is damaged (a row without a round)"):
        read(folder(tmp_path, metrics=metrics))


def test_a_run_must_have_ended_unless_it_need_not(tmp_path):
    folder(tmp_path)
    (tmp_path / "summary.json").unlink()
    with refused(f"compare: {tmp_path} has no summary.json"):
        read(tmp_path)
    assert len(read(tmp_path, unfinished=True).rows) == 3
    run = read(tmp_path, diverged=True, point={"model.lr": 0.5})
    assert run.diverged and not run.finished and run.point == {"model.lr": 0.5}


def test_a_run_that_has_ended_has_its_table_of_clients(tmp_path):
    with refused(f"{tmp_path / 'a'} has no clients.csv"):
        read(folder(tmp_path / "a", clients=None))
    run = read(folder(tmp_path / "b", clients=None, summary={"seed": 3}))
    assert not run.finished and run.clients == {}
    assert read(folder(tmp_path / "c", metrics=None)).rows == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", "one"),
        ("select_by", 3),
        ("wall_seconds", "long"),
        ("higher_is_better", [1]),
        ("versions", "1.0"),
        ("finetuning_samples", 5),
    ],
)
def test_a_summary_with_another_type_is_refused(tmp_path, key, value):
    with refused(f"summary.json: it is damaged ({key}: {value!r})"):
        read(folder(tmp_path, summary={"finished": True, key: value}))


def test_gradients_of_fine_tuning_are_those_of_the_model(tmp_path):
    run = read(folder(tmp_path, summary={"finished": True, "finetuning_samples": {"5": 80}}))
    names = ["finetuned/5", "finetuned/2", "unseen/5", "global", None]
    assert [run.finetuning_samples(name) for name in names] == [80, 0, 0, 0, 0]
    assert read(folder(tmp_path / "a")).finetuning_samples("finetuned/5") == 0


def test_runs_share_a_partition_or_do_not_or_do_not_say():
    def run(value):
        return Run("", 0, Path(), summary={"partition_hash": value})

    assert run("a").shares_partition(run("a")) is True
    assert run("a").shares_partition(run("b")) is False
    assert run("a").shares_partition(run(None)) is None
    assert run(None).shares_partition(run("a")) is None


# ---- clients -------------------------------------------------------------------------------------


def test_columns_of_clients_are_numbers_but_for_their_names(tmp_path):
    clients = read(folder(tmp_path)).clients
    assert clients["client"].tolist() == [0, 1]
    assert clients["name"].tolist() == ["Anna", "Bert"]
    np.testing.assert_array_equal(clients["test/global/loss"], [0.5, np.nan])
    assert clients["test/global/loss"].dtype == np.float64


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "its end is missing"),
        ("client,a\n", "its end is missing"),
        ("client,a\n0,1\n1,2", "its end is missing"),
        ("client,a\n1,1\n0,2\n", "its clients are not 0, 1, 2 and so on, in this order"),
        ("client,a\n0,1\n1\n", ""),
        ("client,a\n0,1\n1,x\n", ""),
        ("client,a\n0,1\n1,2\n2,3\n", "it has 3 rows, client_scores.npy 2"),
    ],
)
def test_a_damaged_table_of_clients_is_refused(tmp_path, text, line):
    append_scores(folder(tmp_path, clients=text) / CLIENTS, 3, {LOSS: np.array([0.5, 0.25])})
    with refused("clients.csv: it is damaged", line):
        read(tmp_path).clients  # noqa: B018


def test_scores_of_clients_by_round_and_without_them_of_the_last_one(tmp_path):
    run = read(folder(tmp_path))
    assert run.client_scores(run.rows[1], LOSS) is None
    np.testing.assert_array_equal(run.client_scores(run.rows[2], LOSS), [0.5, np.nan])
    assert run.client_scores(run.rows[2], ScoreName("test", "global", "error")) is None
    assert Run("", 0, tmp_path).client_scores({"round": 1}, LOSS) is None
    for number, losses in ((2, [1.0, 2.0]), (3, [0.5, 0.25])):
        append_scores(tmp_path / CLIENTS, number, {LOSS: np.array(losses)})
    local = ScoreName("test", "local", "loss")
    append_scores(tmp_path / LOCAL, 2, {local: np.array([4.0, 8.0])})
    run = read(tmp_path)
    assert run.client_scores(run.rows[0], LOSS) is None
    assert run.client_scores(run.rows[1], LOSS).tolist() == [1, 2]
    assert run.client_scores(run.rows[1], local).tolist() == [4, 8]
    assert run.client_scores(run.rows[2], local) is None


# ---- folders -------------------------------------------------------------------------------------


def test_runs_are_found_below_folders_in_the_order_of_their_names(tmp_path):
    """A run is where `metrics.csv` begins with the round, or where its outcome is."""
    for name in ("b/seed1", "b/seed0", "a"):
        folder(tmp_path / name)
    folder(tmp_path / "c", metrics=None, outcome={"status": "diverged"})
    folder(tmp_path / "a" / "logger", metrics="epoch,loss\n0,1\n")
    found = [tmp_path / name for name in ("a", "b/seed0", "b/seed1", "c")]
    assert sorted(find_runs([tmp_path], "compare")) == found
    assert find_runs([tmp_path / "b", tmp_path / "a"], "compare") == [found[1], found[2], found[0]]
    assert find_runs([tmp_path / "b", tmp_path / "b" / "seed0"], "compare") == found[1:3]
    with refused(f"report: {tmp_path / 'd'} is not a folder"):
        find_runs([tmp_path / "d"], "report")
    with refused(f"report: {tmp_path / 'a' / 'logger'} has no metrics.csv"):
        find_runs([tmp_path / "a" / "logger"], "report")


def test_runs_behind_links_are_found_once(tmp_path):
    """A folder of links collects runs of other folders, and a link may name the newest run."""
    runs = [folder(tmp_path / "all" / name) for name in ("first", "second")]
    (tmp_path / "all" / "the newest").symlink_to(runs[1])
    assert find_runs([tmp_path / "all"], "compare") == runs
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    (chosen / "one").symlink_to(runs[0])
    assert find_runs([chosen], "compare") == [chosen / "one"]
    assert find_runs([chosen, tmp_path / "all"], "compare") == [chosen / "one", runs[1]]


def labelled(folders, **given):
    return [(run.label, run.seed) for run in read_runs(folders, **given)]


def config(seed, lr, name):
    model = f"model:\n  class_path: pfl.algorithms.FedAvg\n  init_args:\n    lr: {lr}\n"
    return f"seed_everything: {seed}\ntrainer:\n  name: {name}\n{model}"


def test_runs_of_one_configuration_and_several_seeds_have_one_label(tmp_path):
    folders = [folder(tmp_path / f"seed{s}", config=config(s, 0.1, s)) for s in (4, 7)]
    assert labelled(folders) == [("FedAvg", 4), ("FedAvg", 7)]
    assert config_of(folders[0]) == config(4, 0.1, 4)


def test_two_configurations_of_a_method_are_called_as_their_folders(tmp_path):
    """The seeds of one stand in a folder of it; the label is that of its first run."""
    folders = [
        folder(tmp_path / "slow" / "seed0", config=config(0, 0.1, "x")),
        folder(tmp_path / "slow" / "seed1", config=config(1, 0.1, "x")),
        folder(tmp_path / "fast" / "seed0", config=config(0, 0.5, "x")),
        folder(tmp_path / "other", summary={"finished": True, "algorithm": "Ditto", "seed": 5}),
    ]
    expected = [("slow", 0), ("slow", 1), ("fast", 0), ("Ditto", 5)]
    assert labelled(folders) == expected


def test_runs_with_other_networks_of_torchvision_are_two_methods(tmp_path):
    """A network's `name` is no name of a run: ResNet-34 is no second seed of ResNet-18."""

    def of(seed, network):
        logger = f"  logger:\n  - class_path: CSVLogger\n    init_args: {{name: seed{seed}}}\n"
        trainer = f"trainer:\n  name: x{seed}\n  default_root_dir: runs/{network}\n{logger}"
        model = "model:\n  class_path: pfl.algorithms.FedAvg\n  init_args:\n    network:\n"
        model += f"      class_path: TorchVision\n      init_args:\n        name: {network}\n"
        return f"seed_everything: {seed}\n{trainer}{model}"

    small = [folder(tmp_path / f"small{s}", config=of(s, "resnet18")) for s in (0, 1)]
    large = folder(tmp_path / "large", config=of(1, "resnet34"))
    expected = [("small0", 0), ("small0", 1), ("large", 1)]
    assert labelled([*small, large]) == expected


def test_where_a_seed_and_a_label_come_from(tmp_path):
    """The summary's before the configuration's; the experiment's label before the method's."""
    summary = {"finished": True, "seed": 9, "algorithm": "pfl.algorithms.FedProx"}
    outcome = {"label": "with a term", "status": "diverged"}
    first = folder(tmp_path / "a", config=config(3, 0.1, "x"), summary=summary)
    second = folder(tmp_path / "b", config=config(3, 0.2, "x"), outcome=outcome)
    third = folder(tmp_path / "c", config="model:\n  lr: 1\n")
    fourth = folder(tmp_path / "d")
    folders = [first, second, third, fourth]
    assert labelled(folders) == [("FedProx", 9), ("with a term", 3), ("c", 0), ("d", 0)]
    assert [run.diverged for run in read_runs(folders)] == [False, True, False, False]
    assert config_of(fourth) == ""


def test_a_run_that_has_not_ended_is_read_where_it_may(tmp_path):
    folder(tmp_path)
    (tmp_path / "summary.json").unlink()
    assert labelled([tmp_path], unfinished=True) == [(tmp_path.name, 0)]
    with refused("has no summary.json"):
        read_runs([tmp_path])


def test_a_configuration_that_is_no_mapping_is_refused(tmp_path):
    with refused("config.yaml: it is damaged (it must be a mapping)"):
        read_runs([folder(tmp_path, config="- 1\n")])
