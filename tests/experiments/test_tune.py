"""`pfl tune`: what is tried, what is selected, what an interrupted search does, what comes out."""

import functools
import inspect
import pickle
import statistics

import pytest
import yaml

from pfl import algorithms
from pfl.cli.main import main
from pfl.errors import ConfigError
from pfl.experiments import Comparison, comparison_of, jobs, tuning
from pfl.experiments.progress import Watch
from pfl.experiments.tuning import Range, Tuning, read_space, tune_run
from tests.cli.configurations import SMALL
from tests.commands import call, table
from tests.refusal import refused

LR = "model.init_args.lr"
SPACE = {LR: {"low": "1e-4", "high": 1.0, "log": True}}  # YAML reads 1e-4 as text
VALIDATED = {"class_path": "SplitOwn", "init_args": {"test": 0.3, "validation": 0.3}}
ONE = {"FedAvg": {"model": {"class_path": "FedAvg"}}}
SCORE = {"FedAvg": "val/global/accuracy", "LocalTrain": "val/personalized/accuracy"}


def write(tmp_path, rounds=2, callbacks=(), protocol=VALIDATED, **changes):
    """The path of a file that tunes FedAvg and LocalTrain with three trials each."""
    common = {key: SMALL[key] for key in ("data", "loop")}
    arguments = {**SMALL["data"]["init_args"], "protocol": protocol}
    common["data"] = {**SMALL["data"], "init_args": arguments}
    common["trainer"] = {"max_epochs": rounds, "accelerator": "cpu", "callbacks": [*callbacks]}
    common["model"] = {"init_args": SMALL["model"]["init_args"]}
    epochs = {"model.init_args.local_epochs": [1, 2]}
    runs = {**ONE, "LocalTrain": {"model": {"class_path": "LocalTrain"}, "space": epochs}}
    content = {"seeds": 2, "common": common, "runs": runs, "tune": {"trials": 3, "space": SPACE}}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({**content, **changes}))
    return path


def tune(path, out, *words):
    """The rows of `trials.csv` of a search."""
    status, text, error = call("tune", path, "--out", out, "--jobs", "1", *words)
    assert status == 0, error + text
    return table(out / "trials.csv")


def scores(out, row, metric=None):
    """The validation scores of a trial by round, as its run has recorded them."""
    rows = table(out / row["method"] / f"trial{row['trial']}" / "seed0" / "metrics.csv")
    return [float(entry[metric or SCORE[row["method"]]]) for entry in rows]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The folder of a finished search."""
    folder = tmp_path_factory.mktemp("tune")
    tune(write(folder), folder / "out")
    return folder / "out"


def test_every_method_has_as_many_trials(found):
    rows = table(found / "trials.csv")
    assert [row["method"] for row in rows] == ["FedAvg"] * 3 + ["LocalTrain"] * 3
    assert all(1e-4 <= float(row["model.init_args.lr"]) <= 1 for row in rows)
    assert len({row[LR] for row in rows}) == 6  # the two methods have draws of their own
    assert {row["model.init_args.local_epochs"] for row in rows[3:]} <= {"1", "2"}


def test_the_best_validation_score_selects(found):
    """Recomputed from what the runs have recorded; the test scores would select other values."""
    content = yaml.safe_load((found / "tuned.yaml").read_text())
    for name in SCORE:
        rows = [row for row in table(found / "trials.csv") if row["method"] == name]
        best = [max(scores(found, row)) for row in rows]
        assert [float(row["score"]) for row in rows] == best
        lr = content["runs"][name]["model"]["init_args"]["lr"]
        assert lr == float(rows[best.index(max(best))]["model.init_args.lr"])


@pytest.mark.slow
def test_the_mean_over_seeds_selects(tmp_path):
    """Each trial's score is the mean of its seeds' best ones, as their runs have recorded them."""
    settings = {"trials": 2, "seeds": 2, "space": SPACE}
    path = write(tmp_path, tune=settings, runs=ONE)
    for row in tune(path, tmp_path / "out"):
        trial = tmp_path / "out" / "FedAvg" / f"trial{row['trial']}"
        tables = [table(trial / seed / "metrics.csv") for seed in ("seed0", "seed1")]
        best = [max(float(entry[SCORE["FedAvg"]]) for entry in rows) for rows in tables]
        assert best[0] != best[1]
        assert float(row["score"]) == sum(best) / 2
        assert float(row["rounds"]) == sum(map(len, tables))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "name"),
    [("val/global/loss", "val/global/loss"), ("calibration_error", "val/global/calibration_error")],
)
def test_a_metric_whose_small_values_are_good_selects(tmp_path, metric, name):
    """Given for the trials by its whole name, and for the comparison by its own."""
    settings = {"trials": 3, "space": SPACE} | ({"metric": metric} if "/" in metric else {})
    more = {} if "/" in metric else {"metric": metric}
    path = write(tmp_path, tune=settings, runs=ONE, **more)
    error = "[{class_path: MulticlassCalibrationError, init_args: {num_classes: 10}}]"
    rows = tune(path, tmp_path / "out", "--change", f"loop.metrics={error}")
    best = [min(scores(tmp_path / "out", row, name)) for row in rows]
    assert [float(row["score"]) for row in rows] == best
    text = (tmp_path / "out" / "tune.md").read_text()
    assert f"{min(best):.4f} ({name})" in text
    assert "The comparison in tuned.yaml has seed 0, too: " in text
    assert comparison_of(tmp_path / "out" / "tuned.yaml").metric == more.get("metric")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_figures")
def test_the_tuned_file_can_be_compared(found, tmp_path):
    """Two rounds of three trials each; every client trains one or two epochs a round."""
    file = comparison_of(found / "tuned.yaml")
    assert [job.seed for job in file.jobs()] == [0, 1, 0, 1]
    assert [file.tuning[name]["trials"] for name in SCORE] == [3, 3]
    assert [file.tuning[name]["rounds"] for name in SCORE] == [6, 6]
    status, out, error = call("compare", found / "tuned.yaml", "--out", tmp_path, "--jobs", "1")
    assert status == 0, error
    assert "tuning trials" in out


def test_trials_that_have_ended_are_not_repeated(found, tmp_path):
    """The second search has the records of the first one, seconds among them."""
    before = (found / "trials.csv").read_text()
    tune(write(tmp_path), found)
    assert (found / "trials.csv").read_text() == before


def test_trials_of_another_space_are_told_as_made_again(tmp_path, monkeypatch, capsys):
    """The folders have outcomes of the first search; the third one makes its trials anew.

    What the first trials had left is where its line says.
    """
    told = []

    def watch(runs, made, *rest):
        told.append(len(made))
        return Watch(runs, made, *rest)

    monkeypatch.setattr(tuning, "Watch", watch)
    out = tmp_path / "out"
    first = out / "FedAvg/trial0/seed0/metrics.csv"
    said = []
    for low in (0.01, 0.01, 0.02):
        if first.is_file():
            left = first.read_bytes()
        space = {LR: {"low": low, "high": 1.0}}
        path = write(tmp_path, rounds=1, runs=ONE, tune={"trials": 2, "space": space})
        Tuning.from_file(path).search(out)
        said.append([line for line in capsys.readouterr().out.splitlines() if "again" in line])
    assert told == [0, 2, 0]
    expected = (
        "trials made again, since the configuration changed: 2; what they had left moves to "
        f"folders .replaced in {out}"
    )
    assert said == [[], [], [expected]]
    assert (out / "FedAvg/.replaced/trial0/seed0/metrics.csv").read_bytes() == left


def test_trials_of_other_code_are_told_as_made_again(tmp_path, monkeypatch, capsys):
    path = write(tmp_path, rounds=1, runs=ONE, tune={"trials": 1, "space": SPACE})
    Tuning.from_file(path).search(tmp_path / "out")
    for module in (jobs, tuning):
        monkeypatch.setattr(module, "code_version", lambda config="": "other")
    Tuning.from_file(path).search(tmp_path / "out")
    assert "trials made again, since the code changed: 1; what" in capsys.readouterr().out


def test_more_trials_continue_the_search(tmp_path):
    path = write(tmp_path, runs=ONE, tune={"trials": 1, "space": SPACE})
    (first,) = tune(path, tmp_path / "out")
    path = write(tmp_path, runs=ONE, tune={"trials": 2, "space": SPACE})
    rows = tune(path, tmp_path / "out")
    assert rows[0] == first and len(rows) == 2


def test_every_point_of_a_grid_is_tuned_by_itself(tmp_path):
    grid = {"clients": {"few": {"data.init_args.num_clients": 3}, "all": {"model.init_args.lr": 9}}}
    path = write(tmp_path, rounds=1, runs=ONE, grid=grid, tune={"trials": 2, "space": SPACE})
    out = tmp_path / "out"
    rows = tune(path, out)
    assert [row["clients"] for row in rows] == ["all", "all", "few", "few"]
    best = {}
    for row in rows:
        best[row["clients"]] = max(best.get(row["clients"], ("",)), (row["score"], row[LR]))
    file = comparison_of(out / "tuned.yaml")
    for job in file.jobs():
        point = job.axes["clients"]
        assert job.config["model"]["init_args"]["lr"] == float(best[point][1])
        assert (job.config["data"]["init_args"]["num_clients"] == 3) == (point == "few")
    # Two trials of one round at each point.
    assert file.tuning["FedAvg"]["trials"] == file.tuning["FedAvg"]["rounds"] == 2


@pytest.mark.slow
def test_a_killed_search_continues_where_it_was(found, tmp_path, monkeypatch):
    """Killed in the second round of the second trial; the end is that of an unbroken search."""

    arguments = {"flag": str(tmp_path / "flag"), "within": "trial1", "rounds": 1}
    callback = {"class_path": "tests.experiments.test_compare.FailsOnce", "init_args": arguments}
    path = write(tmp_path, callbacks=[callback], runs=ONE)
    fits, fit = [], jobs._fit
    monkeypatch.setattr(jobs, "_fit", lambda *args: fits.append(args) or fit(*args))
    with pytest.raises(RuntimeError, match="killed"):
        Tuning.from_file(path).search(tmp_path / "out")
    assert not (tmp_path / "out" / "trials.csv").exists()
    actual = tune(path, tmp_path / "out")
    names = [path.parent.name for path, *_ in fits]
    assert names == ["trial0", "trial1", "trial1", "trial2"]
    assert [len(args) for args in fits] == [1, 1, 2, 1]  # the third goes on from a checkpoint
    expected = [row for row in table(found / "trials.csv") if row["method"] == "FedAvg"]
    for one, other in zip(actual, expected, strict=True):
        for name in ("trial", "state", "score", "rounds", "gradients", "model.init_args.lr"):
            assert one[name] == other[name]


@pytest.mark.slow
def test_trials_below_the_median_end_early(tmp_path):
    """The first five trials run to their end, the others as long as they reach the median.

    Median of the earlier finished trials' scores in a round, against the best score so far, from
    the second of four rounds on.
    """
    settings = {"trials": 9, "space": SPACE, "prune_after": 2}
    path, out = write(tmp_path, rounds=4, runs=ONE, tune=settings), tmp_path / "out"
    rows = tune(path, out)
    finished, ended = [], []
    for row in rows:
        values = scores(out, row)
        assert len(values) == float(row["rounds"])
        if len(finished) >= 5:
            medians = [statistics.median(v[r] for v in finished) for r in range(len(values))]
            lags = [max(values[: r + 1]) < medians[r] for r in range(len(values))]
            ended.append(row["state"] == "pruned")
            assert lags[1:] == [False] * (len(lags) - 2) + [ended[-1]]
        finished += [values] if row["state"] == "finished" else []
    assert any(ended)
    assert all(row["state"] == "finished" for row in rows[:5])


def test_the_work_of_a_process_can_be_sent_to_it(tmp_path):
    tuning = Tuning.from_file(write(tmp_path))
    work = functools.partial(tune_run, tuning=tuning)
    assert pickle.loads(pickle.dumps(work)).keywords == {"tuning": tuning}


def test_a_comparison_names_the_command_that_takes_the_file(tmp_path):
    """It had asked for `tuning`, which tuned.yaml has."""
    with refused("small.yaml: there is no key 'tune'; `pfl tune` takes this file"):
        Comparison.from_file(write(tmp_path))


def test_two_searches_do_not_ask_for_the_same_trials(tmp_path, monkeypatch):
    """Each of them would get some numbers of trials, and give others the values of its own."""
    search = Tuning.from_file(write(tmp_path, runs=ONE, tune={"trials": 1, "space": SPACE}))
    make = tuning.execute
    (job, *_) = search.jobs()

    def make_while_another_begins(*words):
        with refused(f"{tmp_path / 'out' / 'FedAvg'}: another process makes these trials"):
            tune_run(job, search, tmp_path / "out")
        return make(*words)

    monkeypatch.setattr(tuning, "execute", make_while_another_begins)
    assert len(tune_run(job, search, tmp_path / "out").records) == 1


def test_values_that_diverge_are_not_chosen(tmp_path):
    """With a rate of 1e30 the first step leaves no finite model."""
    space = {"model.init_args.lr": [0.01, 1e30]}
    rows = tune(
        write(tmp_path, runs=ONE, tune={"trials": 4, "space": space, "seed": 1}), tmp_path / "out"
    )
    states = {float(row["model.init_args.lr"]): row["state"] for row in rows}
    assert states == {0.01: "finished", 1e30: "diverged"}
    assert "| 0.01 " in (tmp_path / "out" / "tune.md").read_text().replace("lr ", "")


def test_a_budget_ends_a_trial_and_chooses_within_it(tmp_path):
    """Of five rounds, the third is the first that exceeds the budget; the best of two counts."""
    runs = {"LocalTrain": {"model": {"class_path": "LocalTrain"}}}
    tuned = {"trials": 1, "space": {LR: [1.0]}}
    path = write(tmp_path, rounds=5, runs=runs, tune=tuned, budget={"rounds": 2})
    (row,) = tune(path, tmp_path / "out")
    by_round = scores(tmp_path / "out", row)
    assert len(by_round) == 3 and row["rounds"] == "3.0" and row["state"] == "finished"
    assert float(row["score"]) == max(by_round[:2])


def test_a_budget_ends_each_run_of_a_trial_of_several_seeds(tmp_path):
    """Of two seeds and five rounds, the third round of each is the first beyond the budget."""
    runs = {"LocalTrain": {"model": {"class_path": "LocalTrain"}}}
    tuned = {"trials": 1, "seeds": 2, "space": {LR: [1.0]}}
    path = write(tmp_path, rounds=5, runs=runs, tune=tuned, budget={"rounds": 2})
    (row,) = tune(path, tmp_path / "out")
    best = []
    for seed in (0, 1):
        rounds = table(tmp_path / "out" / "LocalTrain" / "trial0" / f"seed{seed}" / "metrics.csv")
        assert len(rounds) == 3
        best.append(max(float(one[row["selected_by"]]) for one in rounds[:2]))
    assert row["rounds"] == "6.0" and row["state"] == "finished"
    assert float(row["score"]) == pytest.approx(statistics.mean(best))


def test_changes_of_the_command_line_reach_the_tuned_file(tmp_path):
    words = ["--change", "trainer.max_epochs=1"]
    rows = tune(write(tmp_path, runs=ONE), tmp_path / "out", *words)
    assert [row["rounds"] for row in rows] == ["1.0"] * 3
    (job, _) = comparison_of(tmp_path / "out" / "tuned.yaml").jobs()
    assert job.config["trainer"]["max_epochs"] == 1


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tune": {"trials": 0, "space": SPACE}}, ["tune.trials", "0"]),
        ({"tune": {"trails": 3}}, ["trails", "trials"]),
        ({"tune": {"trials": 3}}, ["tune.space", "FedAvg"]),
        ({"tune": {"space": {"lr": {"low": 1, "high": 0}}}}, ["tune.space.lr", "low"]),
        ({"tune": {"space": {"lr": {"low": 0, "high": 1, "log": True}}}}, ["tune.space.lr"]),
        ({"tune": {"space": {"lr": []}}}, ["tune.space.lr: []", "list of values"]),
        ({"tune": {"space": {"lr": 3}}}, ["tune.space.lr", "3", "list"]),
        ({"tune": {"space": SPACE, "metric": "test/global/accuracy"}}, ["tune.metric", "val/"]),
        ({"tune": {"space": SPACE, "metric": "val/local/loss"}}, ["val/local/loss", "val/global"]),
        (
            {"grid": {"data.init_args.num_clients": [2, 3], "model.init_args.lr": [1, 2]}},
            ["grid", "num_clients", "one axis"],
        ),
        ({"baseline": "FedPrix"}, ["baseline", "FedPrix"]),
        ({"tune": {"space": {"model.init_args.lrr": [1]}}}, ["lrr"]),
        (  # the first value is right, so that the first run would be
            {"tune": {"space": {"model.init_args.lr": [0.1, 0.0]}}},
            ["FedAvg: space.model.init_args.lr: 0.0; it must be positive"],
        ),
        (
            {"tune": {"space": {"model.init_args.engine": ["auto", "fastest"]}}},
            ["FedAvg, space.model.init_args.engine=fastest, seed=0: model.engine"],
        ),
        (
            {"tune": {"space": {"loop.clients_per_round": [2, 4000]}}},
            ["FedAvg, space.loop.clients_per_round=4000, seed=0: loop.clients_per_round: 4000"],
        ),
        (
            {"tune": {"space": {"model.init_args.lr_decay": {"low": 0.5, "high": 1.5}}}},
            ["space.model.init_args.lr_decay: 1.5; it must be positive and at most 1"],
        ),
        (
            {"protocol": {"class_path": "SplitOwn", "init_args": {"validation": 0.0}}},
            ["FedAvg, seed=0: ", "validation"],  # found before the first trial
        ),
    ],
)
def test_a_mistake_in_the_file_gets_one_line(tmp_path, changes, words):
    path = write(tmp_path, **changes)
    status, _, error = call("tune", path, "--out", tmp_path / "out", "--jobs", "1")
    assert status == 2 and error.count("\n") == 1, error
    assert not [word for word in words if word not in error], error


def test_spaces_are_read():
    space = read_space(
        "x", {"a": {"low": "1e-3", "high": 1}, "b": {"low": 1, "high": 5}, "c": [None]}
    )
    assert space["a"] == Range(low=0.001, high=1) and space["c"] == [None]
    with pytest.raises(ConfigError, match=r"x\.a: .*True"):
        read_space("x", {"a": {"low": True, "high": 3}})


def test_the_shipped_file_can_be_read():
    file = Tuning.from_file("tune/digits")
    assert set(file.spaces["FedProx"]) == {"model.init_args.lr", "model.init_args.proximal_weight"}
    job = next(job for job in file.jobs() if job.run == "FedProx")
    assert job.config["model"]["class_path"] == "FedProx"


def test_an_unknown_file_gets_one_line(capsys):
    assert main(["tune", "nothing.yaml"]) == 2
    assert capsys.readouterr().err == "error: tune: nothing.yaml: there is no such file\n"


def test_every_method_has_a_space():
    """Of arguments that it has, each with the learning rate that all are tuned by."""
    tuning = Tuning.from_file("tune/methods")
    kinds = {run: change["model"]["class_path"] for run, change in tuning.runs.items()}
    lora = {"FLoRA", "FedDPA", "FedExLoRA", "FedSALoRA", "FlexLoRA", "RoLoRA"}  # need adapters
    others = {"FederatedAlgorithm", "FedAsync", "FedBuff"}  # equal FedAvg without `loop.clock`
    assert sorted(kinds.values()) == sorted({*algorithms.__all__} - others - lora)
    for run, kind in kinds.items():
        assert LR in tuning.spaces[run]
        for key in tuning.spaces[run].keys() - {LR}:
            classes = getattr(algorithms, kind).__mro__
            own = [name for c in classes for name in inspect.signature(c.__init__).parameters]
            assert key.removeprefix("model.init_args.") in own, (run, key)
