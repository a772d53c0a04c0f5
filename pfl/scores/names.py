"""The name of a score, `<split>/<model>/<number>`, with one spelling in all files and figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

SPLITS = ("val", "test")
MODELS = ("global", "personalized", "knn", "finetuned", "unseen", "local")
STATISTICS = ("_std", "_worst10", "_pooled", "_clients")
"""What `summarize` adds to the name of a mean over clients; no metric may end like this."""


class ScoreName(NamedTuple):
    """The name of one score of every client, and of its mean over clients.

    Attributes:
        split: "val", "test", or "train" with `loop.evaluate: [train, ...]`.
        model: "global", "personalized", "local" (what each client reaches alone), "finetuned/<k>"
            (after k steps of fine-tuning), "unseen/<k>" (the same of clients that never train) or
            "knn" (with a local memory, `loop.neighbours`).
        number: "accuracy", "loss" or the name of a metric.

    Example:
        >>> name = ScoreName.read("test/finetuned/5/accuracy")
        >>> name.model, name.number, str(name)
        ('finetuned/5', 'accuracy', 'test/finetuned/5/accuracy')
    """

    split: str
    model: str
    number: str

    def __str__(self) -> str:
        return "/".join(self)

    @property
    def kind(self) -> str:
        """The model without its number of steps, such as "finetuned"."""
        return self.model.partition("/")[0]

    @property
    def steps(self) -> int:
        """The number of steps of fine-tuning."""
        return int(self.model.partition("/")[2] or 0)

    @classmethod
    def read(cls, text: str) -> ScoreName | None:
        """Returns the name that a column has; None for others, such as `test/global/loss_std`.

        None for those of training samples, too: other numbers, such as `train/global/gap`, are
        called alike (`training_scores`).
        """
        parts = text.split("/")
        whole = len(parts) == 3 or (len(parts) == 4 and parts[2].isdigit())
        if parts[0] not in SPLITS or not (whole and all(parts)) or parts[-1].endswith(STATISTICS):
            return None
        return cls.of(text)

    @classmethod
    def of(cls, text: str) -> ScoreName:
        """Returns the name of a column that is a score."""
        split, _, rest = text.partition("/")
        model, _, number = rest.rpartition("/")
        return cls(split, model, number)


def scores_among(columns: Iterable[str], split: str | None = None) -> list[ScoreName]:
    """Returns the scores among some columns, of one split or both, by kind of model and steps."""
    found = dict.fromkeys(filter(None, map(ScoreName.read, columns)))
    return sorted((name for name in found if split in (None, name.split)), key=_place)


def _place(name: ScoreName) -> tuple[int, int]:
    """Returns where a score's model stands in the order of the tables."""
    return (*MODELS, name.kind).index(name.kind), name.steps


def training_scores(columns: Iterable[str]) -> list[ScoreName]:
    """Returns the scores on training samples among the columns of `metrics.csv`.

    Other columns of `train/`, such as `train/loss`, have no deviation over clients beside them.
    """
    known = dict.fromkeys(columns)
    train = [name for name in known if name.startswith("train/") and f"{name}_std" in known]
    return sorted(map(ScoreName.of, train), key=_place)


def models_of(columns: Iterable[str], number: str, split: str = "test") -> list[str]:
    """Returns the models that have a score of a split, in the order of the tables."""
    return [name.model for name in scores_among(columns, split) if name.number == number]


def numbers_of(columns: Iterable[str], split: str = "test") -> list[str]:
    """Returns the numbers of which there are scores: accuracy, loss and then metrics."""
    found = dict.fromkeys(name.number for name in scores_among(columns, split))
    first = [number for number in HIGHER_IS_BETTER if number in found]
    return list(dict.fromkeys([*first, *found]))


def candidates(columns: Iterable[str], split: str, wanted: str | None = None) -> list[ScoreName]:
    """Returns the scores that may count, the preferred one first.

    Accuracy comes before loss, and a model after the most steps of fine-tuning, which only a
    configuration asks for, before the personalized and the global model. A score that is `wanted`
    may lack the split and the model: `f1_score`, `finetuned/5/accuracy`, `val/global/loss`.

    Example:
        >>> columns = ["test/global/accuracy", "test/finetuned/5/accuracy"]
        >>> [str(name) for name in candidates(columns, "test")]
        ['test/finetuned/5/accuracy', 'test/global/accuracy']
        >>> [str(name) for name in candidates(columns, "test", "global/accuracy")]
        ['test/global/accuracy']
    """
    model, number = parts_of(wanted)
    order = ("finetuned", "personalized", "global")
    numbers = [number]
    if not number:
        numbers = list(HIGHER_IS_BETTER)
    have = [name for name in scores_among(columns, split) if name.number in numbers]
    if model:
        return [name for name in have if name.model == model]
    return sorted(
        (name for name in have if name.kind in order),
        key=lambda name: (numbers.index(name.number), order.index(name.kind), -name.steps),
    )


def parts_of(wanted: str | None) -> tuple[str, str]:
    """Returns the model and the number that a choice names, "" where it leaves one open."""
    *front, number = (wanted or "").split("/")
    return "/".join(front[1:] if front and front[0] in SPLITS else front), number


def wanted_score(metric: str | None, select_by: str | None) -> str | None:
    """Returns the score that counts: an experiment's `metric`, or else a run's `loop.select_by`.

    A `metric` that names no model is of the model that `select_by` names.

    Example:
        >>> wanted_score(None, "global/loss"), wanted_score("f1_score", "global/loss")
        ('global/loss', 'global/f1_score')
    """
    if metric is None:
        return select_by
    model, number = parts_of(metric)
    own = parts_of(select_by)[0]
    if own and not model:
        return f"{own}/{number}"
    return metric


HIGHER_IS_BETTER = {"accuracy": True, "loss": False}
Directions = Mapping[str, "bool | None"]
"""For each metric beside accuracy and loss whether large values are good; None: not known."""


def direction(name: str | ScoreName, metrics: Directions | None = None) -> bool | None:
    """Returns whether large values of a score are good; None if that is not known."""
    return {**HIGHER_IS_BETTER, **(metrics or {})}.get(str(name).rpartition("/")[2])


def signed_score(name: str | ScoreName, value: float, metrics: Directions | None = None) -> float:
    """Returns a score, larger for better: one whose small values are good gets a minus."""
    if direction(name, metrics) is False:
        return -value
    return value
