"""Metrics of torchmetrics, with one value for each client."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torchmetrics import Metric, classification

from pfl.datamodules.errors import require_value
from pfl.datamodules.samples.samples import IGNORED
from pfl.errors import ConfigError
from pfl.scores.forecast import MASE as MASE  # its name is known on the command line
from pfl.scores.names import HIGHER_IS_BETTER, MODELS, STATISTICS, parts_of
from pfl.scores.ranking import NDCG as NDCG  # its name is known on the command line

RESERVED = ("accuracy", "loss", "count")
_UNFIT = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)
_RESET_WHOLE = ("torchmetrics.", "pfl.")
"""Packages whose metrics `reset` sets back. Others may keep numbers without `add_state`, or change
what they are given, and begin with a copy of everything for each client."""
_TASKS = r"^(Binary|Multiclass|Multilabel)(?=[A-Z])"
_CURVES = (
    classification.BinaryPrecisionRecallCurve,
    classification.MulticlassPrecisionRecallCurve,
    classification.MultilabelPrecisionRecallCurve,
)
_AVERAGE_PRECISION = (
    classification.BinaryAveragePrecision,
    classification.MulticlassAveragePrecision,
    classification.MultilabelAveragePrecision,
)


class ClientMetrics:
    """Metrics of torchmetrics, by name, that are computed on each client's samples alone.

    Attributes:
        names: The names, in their order.
        higher_is_better: For each name whether large values are good; None: torchmetrics does not
            say.

    Example:
        >>> from torchmetrics.classification import MulticlassF1Score
        >>> metrics = ClientMetrics.read([MulticlassF1Score(num_classes=2)])
        >>> metrics.names
        ['f1_score']
        >>> metrics.values(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 1])).tolist()
        [1.0]
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = {name: metric.clone() for name, metric in metrics.items()}
        for metric in self._metrics.values():
            metric.distributed_available_fn = _alone
        self.names = list(metrics)
        self.higher_is_better = {n: metric.higher_is_better for n, metric in metrics.items()}

    @classmethod
    def read(cls, given: Sequence[Metric] | Mapping[str, Metric] | None) -> ClientMetrics:
        """Returns the checked metrics of the loop's argument `metrics`.

        A metric without a name is called as its class without the kind of task, in snake case:
        `f1_score` for `MulticlassF1Score`.
        """
        listed = isinstance(given, Iterable) and not isinstance(given, str | nn.Module)
        require_value(
            "loop.metrics",
            f"an object of type {type(given).__name__}",
            given is None or listed,
            "a list of metrics of torchmetrics, or metrics by name, {my_name: metric}",
        )
        if isinstance(given, Mapping):
            keys = list(given)
            metrics = [*given.values()]
        else:
            keys = []
            metrics = list(given or ())
        for metric in metrics:
            require_value(
                "loop.metrics", metric, isinstance(metric, Metric), "a metric of torchmetrics"
            )
        if not keys:
            keys = list(map(short_name, metrics))
        pairs = [*zip(keys, metrics, strict=True)]
        names = [name for name, _ in pairs]
        for name, metric in pairs:
            is_word = name.isascii() and name.isidentifier() and not name.startswith("_")
            taken = name in RESERVED or name.endswith(STATISTICS) or names.count(name) > 1
            if taken or not is_word:
                raise ConfigError(
                    f"loop.metrics: {name!r} cannot be the name of {type(metric).__name__}; it "
                    f"must be one word that is not {', '.join(RESERVED)} or the name of another "
                    f"metric, and does not end with {', '.join(STATISTICS)}, given as the key: "
                    f"{{my_name: {{class_path: ...}}}}"
                )
        return cls(dict(pairs))

    def __len__(self) -> int:
        return len(self.names)

    def check_score(self, key: str, name: str | None, steps: Sequence[int] = ()) -> None:
        """Checks that models can be chosen by a score, such as `finetuned/5/accuracy`, or None.

        Raises:
            ConfigError: There is no such score, it is a test score, or it is not known whether its
                large values are good; the line begins with the `key`.
        """
        if name is None:
            return
        model, number = parts_of(name)
        models = known_models(steps)
        expected = "a validation score, such as val/global/loss, of the models "
        expected += ", ".join(models)
        require_value(key, name, not name.startswith("test/") and model in ("", *models), expected)
        directions = {**HIGHER_IS_BETTER, **self.higher_is_better}
        clear = [score for score, higher in directions.items() if higher is not None]
        expected = f"one of {', '.join(clear)}, or one of loop.metrics with `higher_is_better`"
        require_value(key, name, number in clear, expected)

    @property
    def read_series(self) -> bool:
        """Whether a metric reads a client's training targets, as the scale of a forecast does."""
        return any(_reads_series(metric) for metric in self._metrics.values())

    def begin_client(self, series: Tensor) -> None:
        """Gives metrics a client's training targets [n, ...], on the host, before its `values`."""
        for metric in self._metrics.values():
            if _reads_series(metric):
                metric.begin_client(series)  # type: ignore[operator]

    def values(self, predicted: Tensor, targets: Tensor) -> Tensor:
        """Returns the value of each metric on a client's samples, float64 [number of metrics].

        NaN stands for a value that is not defined on these samples, such as the area under the ROC
        curve where all samples have the same class.

        Args:
            predicted: [n, ...], on the host: probabilities of classes [n, K, ...] or of labels
                [n, L], or values.
            targets: [n, ...]: classes, labels of 0 and 1 as integers, or values. Each class of a
                sequence counts as a sample, and `IGNORED` does not count.

        Raises:
            ConfigError: A metric does not fit these outputs and targets, or has several values.
        """
        if targets.ndim > 1 and predicted.ndim == targets.ndim + 1:  # sequences of classes
            real = targets != IGNORED
            predicted = predicted.movedim(1, -1)[real]
            targets = targets[real]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchmetrics warns of undefined values
            values = [self._value(name, predicted, targets) for name in self.names]
        return torch.tensor(values, dtype=torch.float64)

    def _value(self, name: str, predicted: Tensor, targets: Tensor) -> float:
        metric = self._metrics[name]
        if not type(metric).__module__.startswith(_RESET_WHOLE):
            metric = metric.clone()
            predicted = predicted.clone()
            targets = targets.clone()
        is_binary = type(metric).__name__.startswith("Binary")
        if is_binary and targets.ndim == 1 and predicted.shape[1:] == (2,):
            predicted = predicted[:, 1]  # the network has two outputs
        metric.reset()
        flattens = isinstance(metric, classification.BinaryPrecisionRecallCurve)
        try:
            if flattens and predicted.shape != targets.shape:  # such as ten classes
                raise ValueError("it needs one prediction for each target")
            metric.update(predicted, targets)
        except _UNFIT as error:
            raise ConfigError(
                f"loop.metrics: {type(metric).__name__} cannot compare predictions "
                f"{list(predicted.shape)} with targets {list(targets.shape)} ({targets.dtype}): "
                f"{' '.join(str(error).split())}"
            ) from error
        if not _is_defined(metric, targets):
            return math.nan
        try:
            value = metric.compute()
        except (RuntimeError, ValueError):  # such as R² of one sample
            return math.nan
        finally:
            metric.reset()  # frees the samples that some metrics keep
        if (isinstance(value, Tensor) and value.numel() == 1) or isinstance(value, int | float):
            return float(value)
        if isinstance(value, Tensor):
            shown = f"a tensor {list(value.shape)}"
        else:
            shown = repr(value)
        raise ConfigError(
            f"loop.metrics: {type(metric).__name__}.compute returned {shown}; it must return one "
            f"number, as most metrics do with average: macro"
        )


def known_models(steps: Sequence[int]) -> list[str]:
    """Returns the models that a run may score, with the numbers of steps of its fine-tuning."""
    adapted = [f"finetuned/{k}" for k in steps]
    return [*MODELS[:3], *adapted, *(f"unseen/{k}" for k in sorted({0, *steps}))]


def short_name(metric: Metric) -> str:
    """Returns the class of a metric without the kind of task, in snake case.

    Example:
        >>> from torchmetrics import MeanSquaredError
        >>> from torchmetrics.classification import BinaryAUROC
        >>> short_name(BinaryAUROC()), short_name(MeanSquaredError())
        ('auroc', 'mean_squared_error')
    """
    name = re.sub(_TASKS, "", type(metric).__name__)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _reads_series(metric: Metric) -> bool:
    """Whether a metric has `reads_series = True`, and takes training targets in `begin_client`."""
    return getattr(metric, "reads_series", False)


def _alone() -> bool:
    """Keeps a metric from waiting for other processes: a client's samples are on one process."""
    return False


def _is_defined(metric: Metric, targets: Tensor) -> bool:
    """Whether the classes among the targets define a metric of a ROC or precision-recall curve.

    Where a class has no samples, or all of them, torchmetrics counts its area as 0, and a mean over
    classes would measure how many classes the client has. Metrics of other kinds are NaN, or raise
    an error, where they are not defined.
    """
    if not isinstance(metric, _CURVES):
        return True
    average = getattr(metric, "average", None)
    ignored = getattr(metric, "ignore_index", None)
    if isinstance(metric, classification.MulticlassPrecisionRecallCurve):
        if ignored is not None:
            classes = targets[targets != ignored]
        else:
            classes = targets.flatten()
        positive = torch.bincount(classes, minlength=metric.num_classes)
        total = len(classes)
    else:
        one = isinstance(metric, classification.BinaryPrecisionRecallCurve) or average == "micro"
        labels = targets.reshape(-1, 1 if one else targets.shape[1])
        positive = (labels == 1).sum(0)
        total = len(labels)
    defined = positive > 0
    if not isinstance(metric, _AVERAGE_PRECISION):
        defined &= positive < total
    if average == "weighted" or isinstance(metric, classification.MulticlassAveragePrecision):
        return bool(positive.any() and defined[positive > 0].all())  # absent classes do not count
    return bool(defined.all())
