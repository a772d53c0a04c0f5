"""Names of scores: one spelling, one parser, and which score counts."""

import pytest

from pfl.scores.names import (
    ScoreName,
    candidates,
    direction,
    models_of,
    numbers_of,
    scores_among,
    signed_score,
    training_scores,
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("test/personalized/accuracy", ("test", "personalized", "accuracy")),
        ("val/finetuned/10/f1_score", ("val", "finetuned/10", "f1_score")),
        ("test/local/loss", ("test", "local", "loss")),
        ("test/global/accuracy_std", None),  # a statistic of a score
        ("test/global/f1_score_clients", None),
        ("train/global/gap", None),  # not a score of clients
        ("test/accuracy", None),
        ("test/finetuned/many/loss", None),
        ("comm/uplink_bytes", None),
        ("test_samples", None),
        ("label_0", None),
        ("test_global_accuracy", None),  # the spelling of version 0.1
    ],
)
def test_a_name_is_read_and_spelled_in_one_way(text, name):
    assert ScoreName.read(text) == name
    assert name is None or str(ScoreName(*name)) == text


COLUMNS = [
    "round",
    "test/unseen/0/accuracy",
    "test/finetuned/10/accuracy",
    "test/finetuned/5/accuracy",
    "test/finetuned/5/accuracy_std",
    "test/personalized/loss",
    "test/personalized/accuracy",
    "test/global/f1",
    "test/global/accuracy",
    "val/global/loss",
]


def test_models_and_numbers_come_in_the_order_of_the_tables():
    models = ["global", "personalized", "finetuned/5", "finetuned/10", "unseen/0"]
    assert models_of(COLUMNS, "accuracy") == models
    assert numbers_of(COLUMNS) == ["accuracy", "loss", "f1"]
    assert list(map(str, scores_among(COLUMNS, "val"))) == ["val/global/loss"]


def test_training_scores_have_a_deviation_over_clients():
    """A gap or a loss of local steps is no score of clients, though it is called alike."""
    scores = [f"train/{model}/loss" for model in ("global", "personalized", "finetuned/5")]
    others = ["train/loss", "train/samples", "train/global/gap", "test/global/loss_std"]
    columns = [f"{name}{end}" for name in reversed(scores) for end in ("", "_std", "_worst10")]
    found = training_scores([*others, *columns])
    assert [str(name) for name in found] == scores
    assert [name.model for name in found] == ["global", "personalized", "finetuned/5"]


@pytest.mark.parametrize(
    ("wanted", "split", "first"),
    [
        (None, "test", "test/finetuned/10/accuracy"),  # which only a file asks for
        ("accuracy", "test", "test/finetuned/10/accuracy"),
        ("loss", "test", "test/personalized/loss"),
        ("f1", "test", "test/global/f1"),
        ("global/accuracy", "test", "test/global/accuracy"),
        ("val/personalized/accuracy", "test", "test/personalized/accuracy"),
        ("finetuned/5/accuracy", "test", "test/finetuned/5/accuracy"),
        ("unseen/0/accuracy", "test", "test/unseen/0/accuracy"),
        ("local/accuracy", "test", None),
        (None, "val", "val/global/loss"),
    ],
)
def test_every_score_can_be_the_one_that_counts(wanted, split, first):
    found = candidates(COLUMNS, split, wanted)
    assert (str(found[0]) if found else None) == first


def test_larger_is_better_where_it_is_known():
    metrics = {"error": False, "other": None}
    assert [signed_score(f"test/global/{n}", 2.0, metrics) for n in ("error", "loss", "other")] == [
        -2,
        -2,
        2,
    ]
    assert direction("val/global/other", metrics) is None
