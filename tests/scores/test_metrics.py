"""Metrics of torchmetrics for each client, against scikit-learn on a slow loop, and by hand."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import nn
from torchmetrics import MeanMetric, MeanSquaredError, Metric, MetricCollection, R2Score
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryF1Score,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MultilabelAUROC,
    MultilabelAveragePrecision,
    MultilabelF1Score,
)

from datamodules import MatchLabels, SharedTest, SplitOwn, TensorDataModule
from models import MLP
from pfl.algorithms import FedAvg, LocalTrain
from pfl.callbacks import LocalBaseline, RunRecorder
from pfl.clients import Clients
from pfl.datamodules.rules.partitioner import LogNormal
from pfl.datamodules.samples.samples import IGNORED
from pfl.method.scoring import predictions
from pfl.rounds.loop import FederatedLoop
from pfl.scores.metrics import ClientMetrics
from tests.networks import put
from tests.problems import owned, run
from tests.refusal import refused

PROTOCOLS = {
    "shared": SharedTest(validation=0.2),
    "matched": MatchLabels(samples=13, validation=0.2),
    "own": SplitOwn(test=0.3, validation=0.2),
}
CLASSES = 3


def data(protocol, target="class", clients=7):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(150, 4, generator=generator)
    y = (x @ torch.randn(4, CLASSES, generator=generator)).argmax(1)
    if target == "value":
        y = x[:, 0] * 2
    if target == "labels":
        y = x[:, :2] > 0.5
    kwargs = {"num_clients": clients, "partition": LogNormal(sigma=0.6, min_size=3), "seed": 1}
    return TensorDataModule(x[:100], y[:100], x[100:], y[100:], protocol=protocol, **kwargs)


def outputs_of(module, network, split, models):
    """Yields the outputs of each client's model on the client's samples, and the targets."""
    for c, w in enumerate(models):
        x, y = module.samples.gather(torch.from_numpy(getattr(module.partition, split)[c]))
        with torch.no_grad():
            yield put(network, w).eval()(x.double()), y


def models_of(algorithm):
    if isinstance(algorithm, LocalTrain):
        return "personalized", algorithm.store.read("w", np.arange(7))
    return "global", [algorithm.global_model] * 7


def calibration(p, y, bins=10):
    """The l1 calibration error: bins of the largest probability, weighted by their samples."""
    confidence, hit = p.max(1), p.argmax(1) == y
    place = np.ceil(confidence * bins)
    parts = [place == b for b in range(1, bins + 1) if (place == b).any()]
    return sum(s.mean() * abs(hit[s].mean() - confidence[s].mean()) for s in parts)


@pytest.mark.parametrize(("kind", "at_once"), [(FedAvg, 2), (LocalTrain, None)])
@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_values_are_those_of_each_clients_own_samples(
    tmp_path, monkeypatch, protocol, at_once, kind
):
    monkeypatch.setattr("pfl.method.scoring.POOL", 11)  # most clients are in several pieces
    torch.manual_seed(0)
    algorithm, module = kind(MLP(4, (5,), CLASSES), lr=0.3, batch_size=8), data(protocol)
    given = {
        "f1": MulticlassF1Score(CLASSES),
        "weighted_auroc": MulticlassAUROC(CLASSES, average="weighted"),
        "calibration": MulticlassCalibrationError(CLASSES, n_bins=10),
    }
    run(algorithm, module, 2, root=tmp_path, clients_at_once=at_once, metrics=given)
    kind, models = models_of(algorithm)
    for split in ("val", "test"):
        f1, auroc, error = [], [], []
        for outputs, y in outputs_of(module, algorithm.network, split, models):
            p, y = outputs.softmax(1).numpy(), y.numpy()
            f1.append(reference.f1_score(y, p.argmax(1), average="macro"))
            have = np.unique(y)
            areas = [reference.roc_auc_score(y == k, p[:, k]) for k in have if len(have) > 1]
            weights = [(y == k).mean() for k in have]
            auroc.append(np.dot(areas, weights) if areas else math.nan)
            error.append(calibration(p, y))
        got = algorithm.evaluation.scores[split, kind]
        np.testing.assert_allclose(got["f1"], f1, atol=1e-6)  # torchmetrics has float32
        np.testing.assert_allclose(got["weighted_auroc"], auroc, atol=1e-6)
        np.testing.assert_allclose(got["calibration"], error, atol=1e-6)
        row = algorithm.row
        assert row[f"{split}/{kind}/f1"] == pytest.approx(np.mean(f1), abs=1e-6)
        assert row[f"{split}/{kind}/weighted_auroc"] == pytest.approx(np.nanmean(auroc), abs=1e-6)
        assert row[f"{split}/{kind}/weighted_auroc_clients"] == np.isfinite(auroc).sum()
        assert row[f"{split}/{kind}/calibration_worst10"] == pytest.approx(max(error), abs=1e-6)
        assert row[f"{split}/{kind}/f1_worst10"] == pytest.approx(min(f1), abs=1e-6)


def test_the_local_baseline_and_finetuned_models_have_the_same_metrics(tmp_path):
    torch.manual_seed(0)
    algorithm, module = LocalTrain(MLP(4, (5,), CLASSES), lr=0.3, batch_size=8), data(SplitOwn())
    baseline, given = LocalBaseline(), [MulticlassF1Score(CLASSES)]
    run(algorithm, module, 2, root=tmp_path, callbacks=[baseline], metrics=given, finetune=[0, 1])
    scores = algorithm.evaluation.scores
    own = scores["test", "personalized"]["f1_score"]
    np.testing.assert_allclose(baseline.scores["f1_score"], own, atol=1e-7)  # the same training
    np.testing.assert_array_equal(scores["test", "finetuned/0"]["f1_score"], own)
    assert (scores["test", "finetuned/1"]["f1_score"] != own).any()


def test_a_metric_selects_the_best_round(tmp_path):
    """The best of the rounds by the calibration error, whose small values are good."""
    torch.manual_seed(0)
    algorithm, recorder = FedAvg(MLP(4, (5,), CLASSES), lr=0.5, batch_size=8), RunRecorder()
    given = {"metrics": {"error": MulticlassCalibrationError(CLASSES)}, "select_by": "error"}
    run(algorithm, data(SplitOwn()), 8, root=tmp_path, callbacks=[recorder], **given)
    errors = [row["val/global/error"] for row in recorder.rows]
    accuracies = [row["val/global/accuracy"] for row in recorder.rows]
    assert np.argmin(errors) != np.argmax(accuracies)  # else the test could not fail
    best = recorder.summary["best"]
    assert best["selected_by"] == "val/global/error"
    assert best["round"] == 1 + np.argmin(errors)


ONE_OF = "must be one of accuracy, loss, error, or one of loop.metrics"
MODELS = "global, personalized, knn, finetuned/0, finetuned/5, unseen/0, unseen/5"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("f1_score", ONE_OF),
        ("unclear", ONE_OF),
        ("test/global/accuracy", "must be a validation score"),
        ("finetuned/9/accuracy", MODELS),
        ("unseen/7/loss", MODELS),
        ("global/5/loss", MODELS),
        ("local/loss", MODELS),  # the local baseline has no validation scores
    ],
)
def test_a_score_that_cannot_select_is_refused(name, words):
    """torchmetrics does not know whether a large confidence is good."""
    metrics = {"error": MulticlassCalibrationError(CLASSES), "unclear": MeanMetric()}
    with refused("loop.select_by", words):
        FederatedLoop(data(SplitOwn()), metrics=metrics, finetune=[0, 5], select_by=name)


@pytest.mark.parametrize(
    ("choice", "model"), [(None, "finetuned/2"), ("global/loss", "global"), ("loss", "finetuned/2")]
)
def test_any_model_can_be_the_one_that_counts(tmp_path, choice, model):
    torch.manual_seed(0)
    algorithm, recorder = FedAvg(MLP(4, (5,), CLASSES), lr=0.5, batch_size=8), RunRecorder()
    protocol = SplitOwn(test=0.3, validation=0.3)
    given = {"finetune": [0, 2], "select_by": choice, "callbacks": [recorder]}
    run(algorithm, data(protocol), 3, root=tmp_path, **given)
    number = "loss" if choice else "accuracy"
    values = [row[f"val/{model}/{number}"] for row in recorder.rows]
    best, summary = recorder.summary["best"], recorder.summary
    assert (best["selected_by"], summary["model"]) == (f"val/{model}/{number}", model)
    assert best["round"] == 1 + (np.argmin if choice else np.argmax)(values)


def test_regression_leaves_out_clients_without_a_value(tmp_path):
    """R² needs two samples; a client with one has none, and does not count."""
    x = torch.randn(26, 2, generator=torch.Generator().manual_seed(0))
    module = owned(
        np.repeat([0, 1, 2], [12, 12, 2]),
        *(x, x.sum(1)),
        protocol=SplitOwn(test=0.5, validation=0.0),
    )
    algorithm = FedAvg(MLP(2, (4,), 1), lr=0.05)
    run(algorithm, module, 2, root=tmp_path, metrics=[R2Score(), MeanSquaredError()])
    pairs = outputs_of(module, algorithm.network, "test", [algorithm.global_model] * 3)
    expected = [reference.r2_score(y, outputs[:, 0]) for outputs, y in pairs if len(y) > 1]
    assert len(expected) == 2
    got = algorithm.evaluation.scores["test", "global"]
    np.testing.assert_allclose(got["r2_score"], [*expected, math.nan], rtol=1e-5)
    np.testing.assert_allclose(got["mean_squared_error"], got["loss"], rtol=1e-5)
    row = algorithm.row
    assert row["test/global/r2_score"] == pytest.approx(np.mean(expected))
    assert row["test/global/r2_score_clients"] == 2
    assert row["test/global/mean_squared_error_clients"] == 3


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.MultiLabelSoftMarginLoss()])
def test_several_labels_a_sample(tmp_path, loss):
    torch.manual_seed(0)
    algorithm = FedAvg(MLP(4, (5,), 2), lr=0.5, loss=loss)
    module = data(SplitOwn(test=0.4), "labels")
    given = [MultilabelF1Score(2), MultilabelAveragePrecision(2, average="micro")]
    run(algorithm, module, 3, root=tmp_path, metrics=given)
    got, accuracy, f1, precision = algorithm.evaluation.scores["test", "global"], [], [], []
    for outputs, y in outputs_of(module, algorithm.network, "test", models_of(algorithm)[1]):
        p, y = outputs.sigmoid().numpy(), y.numpy()
        accuracy.append(((p > 0.5) == y).mean())  # of all labels of all samples
        f1.append(reference.f1_score(y, p > 0.5, average="macro", zero_division=0))
        precision.append(reference.average_precision_score(y.ravel(), p.ravel()))
    np.testing.assert_allclose(got["accuracy"], accuracy)
    np.testing.assert_allclose(got["f1_score"], f1, atol=1e-6)
    np.testing.assert_allclose(got["average_precision"], precision, atol=1e-6)
    assert 0 < algorithm.row["test/global/accuracy"] < 1
    loop = algorithm.trainer.datamodule
    clients = Clients(np.array([2]), 0, loop.client_data(torch.device("cpu")), "test")
    algorithm.load_state(clients)
    columns = predictions(algorithm, clients)
    assert (columns["global"] == columns["target"]).mean() == pytest.approx(got["accuracy"][2])


def test_probabilities_of_labels_are_taken_as_they_are():
    algorithm = FedAvg(nn.Sequential(nn.Linear(2, 1), nn.Sigmoid()), loss=nn.BCELoss())
    runner = algorithm.oracle.runner
    p, y = torch.tensor([[0.4], [0.6]]), torch.tensor([[1.0], [1.0]])
    assert runner.scores(p, y)[1].tolist() == [0, 1]
    predicted, labels = runner.predicted(p, y)
    assert predicted.tolist() == p[:, 0].tolist() and labels.tolist() == [1, 1]


# ---- single values -------------------------------------------------------------------------------


def values(metric, predicted, targets):
    return ClientMetrics({"m": metric}).values(torch.tensor(predicted), torch.tensor(targets))[0]


def test_binary_metrics_take_the_second_of_two_classes():
    """Classes 1, 0, 1 are predicted for 1, 1, 0: precision, recall and F1 of class 1 are 1/2."""
    p = [[0.2, 0.8], [0.7, 0.3], [0.4, 0.6]]
    assert values(BinaryF1Score(), p, [1, 1, 0]) == 0.5


@pytest.mark.parametrize(
    "metric, classes, expected",
    [
        (BinaryAUROC(), [0, 0, 0], math.nan),
        (BinaryAUROC(), [1, 1, 1], math.nan),
        (BinaryAUROC(), [0, 1, 0], 0.5),  # 0.3 is above 0.1 and below 0.8
    ],
)
def test_areas_need_both_classes(metric, classes, expected):
    value = values(metric, [[0.2, 0.8], [0.7, 0.3], [0.9, 0.1]], classes)
    assert value == pytest.approx(expected, nan_ok=True)


def test_a_mean_of_areas_over_classes_needs_all_classes():
    """Of three classes a client has two, perfectly ordered: 1, and no 2/3 for the absent one."""
    p, y = [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]], [0, 1]
    assert math.isnan(values(MulticlassAUROC(3), p, y))
    assert values(MulticlassAUROC(3, average="weighted"), p, y) == 1


def test_a_mean_of_precisions_counts_no_class_that_is_absent():
    """Class 0 comes first and third, class 1 second and third: precisions (1 + 2/3) / 2 and 1 for
    class 1 alone; torchmetrics leaves out class 2, which has no samples."""
    p = [[0.8, 0.1, 0.1], [0.3, 0.6, 0.1], [0.2, 0.5, 0.3]]
    ordered = values(MulticlassAveragePrecision(3), p, [0, 1, 0])
    # By class 0: 0.8 (right), 0.3 (wrong), 0.2 (right); by class 1: 0.6 (right), 0.5, 0.1.
    assert ordered == pytest.approx(((1 + 2 / 3) / 2 + 1) / 2)


@pytest.mark.parametrize(("classes", "expected"), [([1, 1], 1.0), ([0, 0], math.nan)])
def test_a_precision_needs_no_negative_sample(classes, expected):
    value = values(BinaryAveragePrecision(), [[0.2, 0.8], [0.7, 0.3]], classes)
    assert value == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("average", "expected"),
    [
        ("macro", math.nan),  # of the second label there are no positive samples
        ("weighted", 1.0),  # of the first label alone
        ("micro", 2 / 3),
    ],
)
def test_areas_of_labels(average, expected):
    """The first label has 0.9 where it is 1 and 0.1 where it is 0; the second, 0 of both samples,
    has 0.95 and 0.2. All four together: 0.9 is above 0.1 and 0.2, and below 0.95."""
    p, y = [[0.9, 0.95], [0.1, 0.2]], [[1, 0], [0, 0]]
    assert values(MultilabelAUROC(2, average=average), p, y) == pytest.approx(expected, nan_ok=True)


def test_classes_of_sequences_count_one_by_one_without_the_padding():
    """Predicted 0, 1, 1 and 1 where the classes are 0, 1, 0 and padding: two of three are right."""
    ones = torch.tensor([[0, 1], [1, 1]])  # [n, T]
    predicted = torch.stack([1.0 - ones, ones], 1)  # [n, K, T]
    targets = torch.tensor([[0, 1], [0, IGNORED]])
    metrics = ClientMetrics.read([MulticlassF1Score(2, average="micro")])
    assert metrics.values(predicted, targets).item() == pytest.approx(2 / 3)


class Counting(Metric):
    """Keeps its sums in plain attributes, which `reset` does not know, and changes its inputs."""

    def __init__(self):
        super().__init__()
        self.hits = 0
        self.samples = 0

    def update(self, probabilities, targets):
        probabilities.neg_()
        self.hits += int((probabilities.argmin(1) == targets).sum())
        self.samples += len(targets)

    def compute(self):
        return self.hits / self.samples


def test_a_metric_of_ones_own_begins_anew_for_each_client():
    """A client with one hit in two samples, then one with two in two; twice."""
    first = torch.tensor([[0.75, 0.25], [0.75, 0.25]])
    metrics = ClientMetrics.read({"own": Counting(), "again": Counting()})
    assert metrics.values(first, torch.tensor([0, 1])).tolist() == [0.5, 0.5]
    assert metrics.values(first, torch.tensor([0, 0])).tolist() == [1.0, 1.0]
    assert first.tolist() == [[0.75, 0.25], [0.75, 0.25]]


class Several(Metric):
    """Returns whatever it is given."""

    def __init__(self, value):
        super().__init__()
        self.value = value
        self.add_state("seen", torch.zeros(1))

    def update(self, predicted, targets):
        self.seen += 1

    def compute(self):
        return self.value


def test_a_metric_may_return_a_plain_number():
    assert values(Several(0.25), [0.0], [0.0]) == 0.25
    assert values(Several(torch.tensor([0.5])), [0.0], [0.0]) == 0.5
    with refused("loop.metrics: Several.compute returned {'a': 1}; it must return one number"):
        values(Several({"a": 1}), [0.0], [0.0])


def test_the_metrics_of_two_clients_do_not_mix():
    metrics = ClientMetrics.read([MulticlassF1Score(2, average="micro")])
    p = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    assert [metrics.values(p, torch.tensor(y)).item() for y in ([1, 0], [0, 1])] == [0, 1]


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, words",
    [
        ([MulticlassF1Score(3), BinaryF1Score()], "'f1_score' cannot be the name of"),
        ({"loss": R2Score()}, "'loss' cannot be the name of R2Score"),
        ({"a/b": R2Score()}, "'a/b' cannot be"),
        (["F1Score"], "a metric of torchmetrics"),
    ],
)
def test_impossible_names_of_metrics_are_refused(given, words):
    with refused("loop.metrics", words):
        ClientMetrics.read(given)


@pytest.mark.parametrize("given", [R2Score(), MetricCollection([R2Score()]), "R2Score", 3])
def test_one_metric_that_is_not_in_a_list_is_refused(given):
    kind = type(given).__name__
    with refused(f"loop.metrics: 'an object of type {kind}'; it must be a list of metrics"):
        ClientMetrics.read(given)


@pytest.mark.parametrize(
    "metric, words",
    [
        (MulticlassF1Score(5), "MulticlassF1Score cannot compare predictions [2, 3]"),
        (BinaryAUROC(), "BinaryAUROC cannot compare predictions [2, 3]"),  # would flatten them
        (MulticlassConfusionMatrix(CLASSES), "compute returned a tensor [3, 3]"),
        (
            MulticlassF1Score(CLASSES, average=None),
            "compute returned a tensor [3]; it must return one number",
        ),
    ],
)
def test_a_metric_that_does_not_fit_is_refused_before_training(tmp_path, metric, words):
    algorithm = FedAvg(MLP(4, (5,), CLASSES))
    with refused("loop.metrics", words):
        run(algorithm, data(SplitOwn()), 2, root=tmp_path, metrics=[metric])
    assert algorithm.rounds == 0
