"""Scores of pixels, forecasts and rankings, by client, against values that are worked out here."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score
from torch import nn
from torchmetrics.classification import MulticlassF1Score, MulticlassJaccardIndex

from datamodules import (
    FederatedDataModule,
    Loaded,
    Natural,
    SharedTest,
    SplitOwn,
    TensorSamples,
)
from models import HalfSquaredError
from pfl.algorithms import FedAvg
from pfl.scores.forecast import MASE
from pfl.scores.metrics import ClientMetrics
from pfl.scores.ranking import NDCG
from tests.problems import owned, run
from tests.refusal import refused

STILL = dict(lr=1e-12, local_steps=1)  # models stay where they begin


def of_clients(method):
    """The test scores of each client after the run, by name."""
    return method.evaluation.scores["test", "global"]


# ---- pixels -------------------------------------------------------------------------------------


class Same(nn.Module):
    """The inputs are the scores of the two classes of each pixel, [B, 2, 2, 2]."""

    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(2, 2, 1, bias=False).double()
        self.head.weight.data.copy_(torch.eye(2)[:, :, None, None])

    def forward(self, x):
        return self.head(x)


@pytest.mark.parametrize("void", [255, -100])
def test_dice_and_intersection_over_union_of_each_client_without_void_pixels(tmp_path, void):
    """Client 0 predicts [0 0 / 1 1] for [0 1 / 1 void]: class 0 has 1 hit, 1 false and 0 missed,
    class 1 has 1 hit, 0 false and 1 missed, so that both have the IoU 1 / 2, the Dice 2 / 3.

    Client 1 predicts [1 1 / 1 0] for [1 1 / void void]: class 1 has IoU and Dice 1, class 0, which
    is neither predicted nor there, does not count.
    """
    predicted = torch.tensor([[[0, 0], [1, 1]], [[1, 1], [1, 0]]])
    targets = torch.tensor([[[0, 1], [1, void]], [[1, 1], [void, void]]])
    inputs = nn.functional.one_hot(predicted, 2).movedim(-1, 1).double()
    data = owned(
        np.arange(2).repeat(2),
        inputs.repeat_interleave(2, 0),
        targets.repeat_interleave(2, 0),
        protocol=SplitOwn(test=0.5, validation=0.0),
    )
    metrics = {"dice": MulticlassF1Score(2), "iou": MulticlassJaccardIndex(2)}
    method = FedAvg(Same(), loss=nn.CrossEntropyLoss(ignore_index=void), **STILL)
    run(method, data, 1, root=tmp_path, metrics=metrics)
    found = of_clients(method)
    np.testing.assert_allclose(found["dice"], [2 / 3, 1])
    np.testing.assert_allclose(found["iou"], [1 / 2, 1])
    np.testing.assert_allclose(found["accuracy"], [2 / 3, 1])
    # The loss: softmax of (1, 0); right pixels -log(e / (e + 1)), wrong ones -log(1 / (e + 1)).
    right = math.log(1 + math.exp(-1))
    np.testing.assert_allclose(found["loss"], [(2 * right + right + 1) / 3, right])


# ---- rankings -----------------------------------------------------------------------------------


def test_the_gain_of_a_ranking_by_hand():
    """The order of the scores has the relevances 0, 1, 0, 2; the best one 2, 1, 0, 0."""
    scores = torch.tensor([0.1, 0.9, 0.3, 0.4])
    relevances = torch.tensor([2.0, 0.0, 0.0, 1.0])
    best = 2 + 1 / math.log2(3)
    whole = (1 / math.log2(3) + 2 / math.log2(5)) / best
    first = (1 / math.log2(3)) / best
    values = ClientMetrics.read({"all": NDCG(), "two": NDCG(k=2)}).values(scores, relevances)
    assert values.tolist() == pytest.approx([whole, first], rel=1e-12)


@pytest.mark.parametrize("k", [None, 3])
def test_items_of_equal_scores_are_in_all_orders(k):
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = rng.integers(0, 4, 9) / 4
        relevances = rng.integers(0, 3, 9)
        relevances[0] = 1
        found = ClientMetrics.read([NDCG(k)]).values(*map(torch.from_numpy, (scores, relevances)))
        assert float(found) == pytest.approx(ndcg_score([relevances], [scores], k=k), rel=1e-12)


def test_a_user_without_a_relevant_item_does_not_count():
    values = ClientMetrics.read([NDCG()]).values(torch.tensor([0.2, 0.4]), torch.tensor([0, 0]))
    assert values.isnan().all()


def test_what_cannot_be_ranked_is_refused():
    metrics = ClientMetrics.read([NDCG()])
    with refused("loop.metrics: NDCG", "one score and one relevance"):
        metrics.values(torch.rand(4, 3), torch.arange(4))
    with refused("loop.metrics: NDCG", "negative"):
        metrics.values(torch.rand(2), torch.tensor([-1.0, 1.0]))
    with refused("NDCG.k: 0"):
        NDCG(k=0)


# ---- forecasts ----------------------------------------------------------------------------------


class Given(FederatedDataModule):
    """Samples that are there."""

    def __init__(self, loaded, protocol):
        super().__init__(partition=Natural(), protocol=protocol)
        self.loaded = loaded

    def load(self):
        return self.loaded


def series(protocol, order=None):
    """Client "a" has 10, 12, 15, 11 (then 14), client "b" 1, 1, 3, 2 (then 5); it rises by 0."""
    values = torch.tensor([10.0, 1, 12, 1, 15, 3, 11, 2, 14, 5]).double()
    times = np.repeat(np.arange(5), 2)
    rows = np.arange(10) if order is None else order
    names = np.array(["a", "b"] * 5)[rows]
    samples = TensorSamples(torch.ones(10, 1).double()[rows], values[rows])
    return Given(Loaded(samples, None, names, {"time": times[rows]}), protocol)


class Constant(nn.Module):
    """Forecasts 10, whatever the past."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 1, bias=False).double()
        self.head.weight.data.fill_(10.0)

    def forward(self, x):
        return self.head(x)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("season", [1, 2])
def test_the_scaled_error_of_each_clients_forecasts(tmp_path, shuffled, season):
    """The last value is the test's: |14 - 10| = 4 for "a" and |5 - 10| = 5 for "b".

    The moves by one step are 2, 3, 4 and 0, 2, 1; those by two steps 5, 1 and 2, 1.
    """
    order = np.random.default_rng(1).permutation(10) if shuffled else None
    protocol = SplitOwn(test=0.2, validation=0.0, order="time")
    method = FedAvg(Constant(), loss=HalfSquaredError(), **STILL)
    run(method, series(protocol, order), 1, root=tmp_path, metrics=[MASE(season)])
    scale = {1: [9 / 3, 3 / 3], 2: [6 / 2, 3 / 2]}[season]
    found = of_clients(method)["mase"]
    np.testing.assert_allclose(found, np.array([4, 5]) / scale)


def test_the_scale_is_each_clients_own_for_test_samples_of_all(tmp_path):
    data = owned(
        np.array([0, 0, 1, 1]),
        torch.ones(4, 1).double(),
        torch.tensor([1.0, 2, 1, 5]).double(),
        torch.ones(1, 1).double(),
        torch.tensor([12.0]).double(),
        protocol=SharedTest(validation=0.0),
    )
    method = FedAvg(Constant(), loss=HalfSquaredError(), **STILL)
    run(method, data, 1, root=tmp_path, metrics=[MASE()])
    np.testing.assert_allclose(of_clients(method)["mase"], [2 / 1, 2 / 4])


def test_a_constant_series_has_no_scale():
    metrics = ClientMetrics.read([MASE()])
    metrics.begin_client(torch.ones(3))
    assert metrics.values(torch.rand(2), torch.rand(2)).isnan().all()
    with refused("loop.metrics: MASE", "values, as in a regression"):
        metrics.values(torch.rand(2, 2), torch.tensor([0, 1]))
