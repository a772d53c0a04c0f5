"""`loop.select_by` names the score that counts for kept checkpoints, trials and searches, too."""

from types import SimpleNamespace

import pytest

from pfl.experiments.callbacks import BestRound, Pruning, check_validated
from pfl.experiments.search import Search
from pfl.report.comparison import ComparedRuns
from pfl.scores.runs import Run
from tests.refusal import refused

# The personalized model is best in round 1, the global one in round 2, its loss in round 3.
ROWS = [
    {"round": number, "train/samples": 1.0}
    | {"val/personalized/accuracy": own, "val/global/accuracy": shared, "val/global/loss": loss}
    | {"test/personalized/accuracy": 0.9, "test/global/accuracy": test}
    for number, own, shared, loss, test in [
        (1, 0.9, 0.5, 3.0, 0.1),
        (2, 0.8, 0.7, 2.0, 0.2),
        (3, 0.7, 0.6, 1.0, 0.3),
    ]
]
CASES = [
    (None, None, 1),
    (None, "global/loss", 3),
    ("accuracy", "global/loss", 2),  # of the model that `select_by` names
    ("personalized/accuracy", "global/loss", 1),
    ("accuracy", "loss", 1),  # no model is named
]


def finished(tmp_path, select_by):
    """A run with these rows whose configuration names the score."""
    return Run("A", 0, tmp_path, rows=ROWS, summary={"finished": True, "select_by": select_by})


@pytest.mark.parametrize(("metric", "select_by", "best"), CASES)
def test_the_kept_checkpoint_is_of_the_round_that_counts(tmp_path, metric, select_by, best):
    """docs/compare.md: `best.ckpt` is of the round that the tables show."""
    saved = []
    loop = SimpleNamespace(metrics=SimpleNamespace(higher_is_better={}), select_by=select_by)
    trainer = SimpleNamespace(datamodule=loop, default_root_dir=tmp_path)
    kept = BestRound(metric)
    for row in ROWS:
        trainer.save_checkpoint = lambda path, number=row["round"]: saved.append(number)
        kept.on_train_epoch_end(trainer, SimpleNamespace(rounds=row["round"], row=row))
    assert saved[-1] == best
    run = finished(tmp_path, select_by)
    assert run.selected(metric=metric)["round"] == best
    name = str(ComparedRuns([run], "A", metric=metric).score_of("A"))
    if metric == "accuracy" and select_by == "global/loss":  # the table has this model's score
        assert name == "test/global/accuracy"


def test_no_checkpoint_is_kept_of_a_round_after_the_budget(tmp_path):
    """The loss is best in round 3, and of the two rounds within the budget in round 2."""
    saved = []
    loop = SimpleNamespace(metrics=SimpleNamespace(higher_is_better={}), select_by=None)
    trainer = SimpleNamespace(datamodule=loop, default_root_dir=tmp_path)
    kept = BestRound("global/loss", ("rounds", 2.0))
    for row in ROWS:
        trainer.save_checkpoint = lambda path, number=row["round"]: saved.append(number)
        kept.on_train_epoch_end(trainer, SimpleNamespace(rounds=row["round"], row=row))
    assert saved == [1, 2]
    run = finished(tmp_path, None)
    assert run.selected(("rounds", 2.0), "global/loss")["round"] == 2


@pytest.mark.parametrize(("metric", "select_by", "best"), CASES)
def test_a_search_scores_the_round_that_counts(tmp_path, metric, select_by, best):
    search = SimpleNamespace(metric=metric, limit=None)
    name, value = Search._score(search, finished(tmp_path, select_by), "val")
    assert value == ROWS[best - 1][name]
    model, number = name.split("/")[1:]
    wanted = (metric or select_by or "accuracy").split("/")
    assert number == wanted[-1] and (model == "personalized") == (best == 1)


def test_trials_report_the_score_that_counts(tmp_path):
    """The global loss, with a minus, as larger is better for Optuna."""
    reported = []
    loop = SimpleNamespace(metrics=SimpleNamespace(higher_is_better={}), select_by="global/loss")
    strategy = SimpleNamespace(broadcast=bool)
    trainer = SimpleNamespace(datamodule=loop, is_global_zero=True, strategy=strategy)
    pruning = Pruning("", "", 0)
    pruning._report = lambda rounds, score: reported.append((rounds, score))
    for row in ROWS:
        pruning.on_train_epoch_end(trainer, SimpleNamespace(rounds=row["round"], row=row))
    assert reported == [(1, -3.0), (2, -2.0), (3, -1.0)]


def test_a_score_that_a_method_lacks_is_refused_under_the_key_that_names_it():
    with refused("loop.select_by: knn/accuracy; it must be one of val/global/accuracy, "):
        check_validated(ROWS[0], None, "knn/accuracy")
    with refused("tune.metric: knn/accuracy; it must be one of"):
        check_validated(ROWS[0], "knn/accuracy", "global/loss")
