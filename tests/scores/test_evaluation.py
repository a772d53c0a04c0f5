"""Scores: sums by client, the reported numbers by hand, and every path against a slow loop."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import Metric

from datamodules import DigitsDataModule, MatchLabels, SharedTest, SplitOwn, TensorDataModule
from models import MLP
from pfl import FederatedLoop
from pfl.algorithms import FedAvg, FedSLR, LocalTrain
from pfl.clients import Clients
from pfl.datamodules.rules.partitioner import LogNormal
from pfl.method.scoring import Evaluation, predictions
from pfl.scores.distribution import worst_tenth
from pfl.scores.evaluation import (
    ClientScores,
    Finetuning,
    Scores,
    client_mean,
    scores_by_name,
    summarize,
)
from pfl.scores.metrics import ClientMetrics
from pfl.scores.names import ScoreName
from tests.networks import put
from tests.problems import run
from tests.refusal import refused

NAN = float("nan")


def scores(accuracy, loss, count):
    return {
        "accuracy": np.array(accuracy, float),
        "loss": np.array(loss, float),
        "count": np.array(count, float),
    }


# ---- the reported numbers ------------------------------------------------------------------------


def test_numbers_by_hand():
    """Three clients: accuracies 0.5, 1, 0 with 2, 1 and 5 samples; losses 1, 4, 1."""
    row = summarize(scores([0.5, 1, 0], [1, 4, 1], [2, 1, 5]))
    assert row == pytest.approx(
        {
            "accuracy": 0.5,
            "accuracy_std": math.sqrt((0 + 0.25 + 0.25) / 3),
            "accuracy_worst10": 0.0,  # a tenth of 3, rounded up: 1 client
            "accuracy_pooled": (2 * 0.5 + 1 * 1 + 5 * 0) / 8,
            "loss": 2.0,
            "loss_std": math.sqrt((1 + 4 + 1) / 3),
            "loss_worst10": 4.0,  # of a loss the highest is the worst
            "loss_pooled": (2 * 1 + 1 * 4 + 5 * 1) / 8,
        }
    )
    assert all(type(value) is float for value in row.values())


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_the_worst_tenth_is_rounded_up(clients, worst):
    """Accuracies and losses 1, 2, ..., n in a mixed order: mean of the lowest, of the highest."""
    values = np.random.default_rng(0).permutation(np.arange(1.0, clients + 1))
    row = summarize(scores(values, values, np.ones(clients)))
    lowest = sum(range(1, worst + 1)) / worst
    assert row["accuracy_worst10"] == pytest.approx(lowest)
    assert row["loss_worst10"] == pytest.approx(clients + 1 - lowest)
    assert worst_tenth(values) == pytest.approx(lowest)


def test_clients_without_samples_are_left_out():
    few = summarize(scores([0.5, NAN, 1, NAN], [1, NAN, 3, NAN], [2, 0, 6, 0]))
    assert few == summarize(scores([0.5, 1], [1, 3], [2, 6]))
    assert few["accuracy"] == 0.75
    assert few["accuracy_pooled"] == pytest.approx((2 * 0.5 + 6 * 1) / 8)


def test_regression_has_no_accuracy():
    row = summarize(scores([NAN, NAN], [1, 3], [1, 1]))
    assert sorted(row) == ["loss", "loss_pooled", "loss_std", "loss_worst10"]
    assert row["loss"] == 2


def test_a_model_that_diverged_is_seen():
    """One client's NaN loss must not be averaged away, and must not hide the accuracy."""
    row = summarize(scores([0.5, 0.1], [1, NAN], [1, 1]))
    assert math.isnan(row["loss"])
    assert math.isnan(row["loss_pooled"])
    assert math.isnan(row["loss_worst10"])
    assert row["accuracy"] == pytest.approx(0.3)


def test_without_samples_there_are_no_numbers():
    assert summarize(scores([NAN, NAN], [NAN, NAN], [0, 0])) == {}


def test_scores_are_summed_by_client():
    metric = ClientScores(4)
    ids = torch.tensor([2, 0])
    metric.update(ids, torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([2, 1]))
    # The same client again, and twice in one call, as samples pooled by client come.
    metric.update(
        torch.tensor([2, 2, 3]),
        torch.tensor([1.0, 2, 5]),
        torch.tensor([0.0, 1, NAN]),
        torch.ones(3),
    )
    result = metric.compute()
    np.testing.assert_array_equal(result["count"], [1, 0, 4, 1])
    np.testing.assert_allclose(result["loss"], [1, NAN, 6 / 4, 5])
    np.testing.assert_allclose(result["accuracy"], [1, NAN, 2 / 4, NAN])
    assert result["loss"].dtype == np.float64


class Answer(Metric):
    """A metric whose value is the mean target, or one that it is given."""

    higher_is_better = True

    def __init__(self, value=None):
        super().__init__()
        self.value = value
        self.add_state("total", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, predicted, targets):
        self.total += torch.tensor([targets.double().sum(), len(targets)])

    def compute(self):
        if self.value is not None:
            return self.value
        return self.total[0] / self.total[1]


def test_metrics_are_computed_once_all_samples_of_a_client_have_come():
    """Client 2 has the targets 1, 0 and then 1, client 0 has 5; clients 1 and 3 get a copy of
    client 2's scores, and client 4 has no samples."""
    metric = ClientScores(5, ClientMetrics({"m": Answer()}))

    def pair(*targets):
        return torch.zeros(len(targets)), torch.tensor(targets)

    ids = torch.tensor([0, 2])
    metric.add(
        Scores(ids, torch.ones(2), torch.ones(2), torch.tensor([1, 2]), [pair(5), pair(1, 0)])
    )
    metric.finish(but=2)
    assert metric.compute()["m"][0] == 5
    one = torch.ones(1)
    metric.add(Scores(ids[1:], one, one, one, [pair(1)]))
    metric.finish()
    metric.copy(2, torch.tensor([1, 3]))
    result = metric.compute()
    np.testing.assert_allclose(result["m"], [5, 2 / 3, 2 / 3, 2 / 3, NAN])
    np.testing.assert_array_equal(result["count"], [1, 3, 3, 3, 0])
    np.testing.assert_allclose(result["loss"], [1, 2 / 3, 2 / 3, 2 / 3, NAN])


def test_values_of_metrics_are_exact_beyond_float32():
    metric = ClientScores(1, ClientMetrics({"m": Answer(2.0**24 + 1)}))
    one = torch.ones(1)
    metric.add(Scores(torch.tensor([0]), one, one, one, [(torch.zeros(1), torch.zeros(1))]))
    metric.finish()
    assert metric.compute()["m"].tolist() == [2**24 + 1]


def test_metrics_are_summarized_over_the_clients_that_have_them():
    """Of four clients two have the metric, and nobody has the other one."""
    numbers = scores([0.5] * 4, [1.0] * 4, [1] * 4)
    numbers |= {"error": np.array([0.25, NAN, 0.75, NAN]), "none": np.full(4, NAN)}
    row = summarize(numbers, {"error": False, "none": True})
    assert row["error"] == 0.5
    assert row["error_std"] == 0.25
    assert row["error_worst10"] == 0.75
    assert row["error_clients"] == 2
    assert {name for name in row if name.startswith("none")} == {"none_clients"}
    assert row["none_clients"] == 0


def test_a_metric_without_a_direction_has_no_worst_clients():
    row = client_mean("test/global/other", np.array([1.0, 3.0]), {"other": None})
    assert row == {"test/global/other": 2.0, "test/global/other_std": 1.0}


def test_all_but_the_counts_are_recorded_for_each_client():
    numbers = scores([0.5], [1.0], [3])
    found = scores_by_name({("test", "global"): numbers, ("val", "finetuned/2"): numbers})
    assert [*map(str, found)] == [
        "test/global/accuracy",
        "test/global/loss",
        "val/finetuned/2/accuracy",
        "val/finetuned/2/loss",
    ]
    assert found[ScoreName("val", "finetuned/2", "loss")].tolist() == [1.0]


# ---- fine-tuning ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "steps", "unseen"),
    [
        (None, (), (0,)),
        (0, (0,), (0,)),
        (5, (5,), (0, 5)),
        ([7, 0, 2], (0, 2, 7), (0, 2, 7)),
        (2**63 - 1, (2**63 - 1,), (0, 2**63 - 1)),
    ],
)
def test_numbers_of_steps_are_read(given, steps, unseen):
    read = Finetuning.read(given, 0.5)
    assert (read.steps, read.for_unseen, read.lr) == (steps, unseen, 0.5)


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        (-1, "loop.finetune: -1; it must be a number of local steps of at least 0"),
        ([2, True], "loop.finetune: [2, True]; it must be a number of local steps"),
        (2**63, "loop.finetune: 9223372036854775808; it must be a number of local steps"),
        ([3, 3], "loop.finetune: [3, 3]; it must be a list of different numbers"),
    ],
)
def test_impossible_fine_tuning_is_refused(steps, line):
    with refused(line):
        Finetuning.read(steps, None)


def test_sums_are_exact_beyond_float32():
    """2^24 + 1 is no float32: 16,777,217 samples would be lost by one."""
    metric = ClientScores(1)
    one = torch.tensor([0])
    metric.update(one, torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([2**24]))
    metric.update(one, torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([1]))
    assert metric.compute()["count"].item() == 2**24 + 1


# ---- real models against a slow loop -------------------------------------------------------------


PROTOCOLS = {
    "shared": SharedTest(validation=0.2),
    "matched": MatchLabels(samples=13, validation=0.2),
    "own": SplitOwn(test=0.3, validation=0.2),
}


def data(protocol, regression=False, clients=7):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(150, 4, generator=generator)
    y = x[:, 0] * 2 if regression else (x @ torch.randn(4, 3, generator=generator)).argmax(1)
    kwargs = {"num_clients": clients, "partition": LogNormal(sigma=0.6, min_size=3), "seed": 1}
    return TensorDataModule(x[:100], y[:100], x[100:], y[100:], protocol=protocol, **kwargs)


def slow(module, network, split, models):
    """Accuracy and loss of each client's model on the client's samples, one after another."""
    accuracy, loss = [], []
    for c, w in enumerate(models):
        index = torch.from_numpy(getattr(module.partition, split)[c])
        x, y = module.samples.gather(index)
        with torch.no_grad():
            outputs = put(network, w).eval()(x.double())
        if y.is_floating_point():
            accuracy.append(NAN)
            loss.append(F.mse_loss(outputs.view(-1), y.double()).item())
        else:
            accuracy.append((outputs.argmax(1) == y).double().mean().item())
            loss.append(F.cross_entropy(outputs, y).item())
    return {"accuracy": np.array(accuracy), "loss": np.array(loss)}


def assert_scores(got, expected, sizes):
    np.testing.assert_array_equal(got["count"], sizes)
    np.testing.assert_allclose(got["accuracy"], expected["accuracy"], rtol=1e-12)
    np.testing.assert_allclose(got["loss"], expected["loss"], rtol=1e-10)


@pytest.mark.parametrize("kind", [FedAvg, LocalTrain])
@pytest.mark.parametrize(
    ("engine", "at_once"), [("sequential", None), ("sequential", 1), ("vmap", 3), ("vmap", None)]
)
@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_scores_are_those_of_a_slow_loop(tmp_path, protocol, engine, at_once, kind):
    torch.manual_seed(0)
    algorithm = kind(MLP(4, (5,), 3), lr=0.3, batch_size=8, engine=engine)
    module = data(protocol)
    # Two clients never train: alone they are judged by the common initial model.
    trace = [[0, 2, 3], [4, 6, 2]]
    run(algorithm, module, 2, root=tmp_path, clients_at_once=at_once, trace=trace)
    name, other, models = "global", "personalized", [algorithm.global_model] * 7
    if kind is LocalTrain:
        name, other, models = other, name, algorithm.store.read("w", np.arange(7))
        assert len(models.unique(dim=0)) == 5 + 1
    for split in ("val", "test"):
        expected = slow(module, algorithm.network, split, models)
        sizes = getattr(module.partition, split).sizes
        assert_scores(algorithm.evaluation.scores[split, name], expected, sizes)
        accuracy, loss = (algorithm.row[f"{split}/{name}/{n}"] for n in ("accuracy", "loss_pooled"))
        assert accuracy == pytest.approx(expected["accuracy"].mean())
        assert loss == pytest.approx(sizes / sizes.sum() @ expected["loss"])
    assert set(algorithm.evaluation.scores) == {("val", name), ("test", name)}
    # 4 x 5 + 5 and 5 x 3 + 3 parameters
    assert algorithm.row[f"parameters/{name}"] == 43
    assert f"parameters/{other}" not in algorithm.row


def test_a_shared_test_set_gives_everyone_the_score_of_the_one_model(tmp_path):
    torch.manual_seed(0)
    algorithm, module = FedAvg(MLP(4, (5,), 3), lr=0.3), data(SharedTest())
    run(algorithm, module, 2, root=tmp_path, clients_at_once=2)
    x, y = module.samples.gather(torch.arange(100, 150))
    with torch.no_grad():
        outputs = put(algorithm.network, algorithm.global_model).eval()(x.double())
    got = algorithm.evaluation.scores["test", "global"]
    assert (got["accuracy"] == (outputs.argmax(1) == y).double().mean().item()).all()
    np.testing.assert_allclose(got["loss"], F.cross_entropy(outputs, y).item())
    assert algorithm.row["test/global/accuracy_std"] == 0


@pytest.mark.parametrize("at_once", [None, 2])
def test_means_over_a_batch_are_over_the_samples_of_one_client(tmp_path, at_once):
    """BatchNorm without statistics: the score is no other where clients are scored together."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(1, track_running_stats=False)
    network = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), norm, nn.Flatten(), nn.Linear(4, 3))
    algorithm, module = FedAvg(network, lr=0.3, batch_size=8), data(SplitOwn(test=0.3))
    run(algorithm, module, 2, root=tmp_path, clients_at_once=at_once)
    expected = slow(module, algorithm.network, "test", [algorithm.global_model] * 7)
    scored = algorithm.evaluation.scores["test", "global"]
    assert_scores(scored, expected, module.partition.test.sizes)


def counting(monkeypatch, algorithm):
    """How many samples the global model is run on."""
    seen = []
    run = algorithm.oracle.evaluate_one

    def evaluate_one(w, inputs, targets, buffers=None):
        seen.append(len(inputs))
        return run(w, inputs, targets, buffers)

    monkeypatch.setattr(algorithm.oracle, "evaluate_one", evaluate_one)
    return seen


def test_a_shared_test_set_is_scored_once_in_a_pass(tmp_path, monkeypatch):
    algorithm, module = FedAvg(MLP(4, (5,), 3)), data(SharedTest(validation=0))
    seen = counting(monkeypatch, algorithm)
    run(algorithm, module, 2, root=tmp_path, clients_at_once=2)
    assert seen == [50, 50]  # 2 rounds, not 7 clients in 4 chunks


@pytest.mark.parametrize("kind", [FedAvg, LocalTrain])
def test_regression_has_losses_and_no_accuracy(tmp_path, kind):
    algorithm, module = kind(MLP(4, (5,), 1), lr=0.05), data(SplitOwn(), regression=True)
    run(algorithm, module, 2, root=tmp_path)
    name = "global" if kind is FedAvg else "personalized"
    models = [algorithm.global_model] * 7
    if kind is LocalTrain:
        models = algorithm.store.read("w", np.arange(7))
    expected = slow(module, algorithm.network, "test", models)
    got = algorithm.evaluation.scores["test", name]
    np.testing.assert_allclose(got["loss"], expected["loss"], rtol=1e-10)
    assert np.isnan(got["accuracy"]).all()
    assert algorithm.row[f"test/{name}/loss"] == pytest.approx(expected["loss"].mean())
    assert f"test/{name}/accuracy" not in algorithm.row


def test_more_samples_than_one_forward_pass_takes(tmp_path, monkeypatch):
    monkeypatch.setattr("pfl.method.scoring.POOL", 6)
    torch.manual_seed(0)
    algorithm, module = FedAvg(MLP(4, (5,), 3), lr=0.3), data(MatchLabels(samples=13))
    seen = counting(monkeypatch, algorithm)
    run(algorithm, module, 2, root=tmp_path)
    assert max(seen) == 6
    expected = slow(module, algorithm.network, "test", [algorithm.global_model] * 7)
    assert_scores(
        algorithm.evaluation.scores["test", "global"], expected, module.partition.test.sizes
    )


def test_numbers_of_parameters_are_averaged_over_all_clients(tmp_path):
    """Also over chunks of different lengths: (0 + 1 + ... + 6) / 7 = 3."""

    class Counted(LocalTrain):
        def parameters_personalized(self, clients, w):
            return torch.from_numpy(clients.ids)

    algorithm = Counted(MLP(4, (5,), 3))
    run(algorithm, data(SplitOwn()), 2, root=tmp_path, clients_at_once=5)
    assert algorithm.row["parameters/personalized"] == 3


def test_large_numbers_of_parameters_are_exact(tmp_path):
    """2^24 + 1 is no float32; networks are larger than that."""

    class Large(LocalTrain):
        def parameters_personalized(self, clients, w):
            return torch.full((len(clients),), 2**24 + 1)

    algorithm = Large(MLP(4, (5,), 3))
    run(algorithm, data(SplitOwn()), 2, root=tmp_path)
    assert algorithm.row["parameters/personalized"] == 2**24 + 1


def test_a_model_of_zeros_has_no_parameters(tmp_path):
    """A penalty above all weights and gradients leaves nothing of the sparse model: 0, not a gap.

    With w_0 = 0 and one local step the mean of w_i and the multipliers' are at most a few, and the
    threshold is λ η_g = 1000.
    """
    network = MLP(4, (5,), 3)
    nn.utils.vector_to_parameters(torch.zeros(43), network.parameters())
    penalties = {"low_rank_penalty": 1000.0, "proximal_step": 1.0, "global_component": "sparse"}
    algorithm = FedSLR(network, local_steps=1, **penalties)
    run(algorithm, data(SplitOwn()), 1, root=tmp_path)
    assert not algorithm.global_model.any()
    assert algorithm.row["parameters/global"] == 0


def test_an_evaluation_without_models_has_no_numbers():
    evaluation = Evaluation(FederatedLoop(DigitsDataModule(3)), torch.device("cpu"))
    assert evaluation.finish() == {}


# ---- predictions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [4096, 5])
def test_predictions_by_client_and_sample(tmp_path, monkeypatch, pool):
    monkeypatch.setattr("pfl.method.scoring.POOL", pool)

    class Both(LocalTrain):
        has_global = True

    torch.manual_seed(0)
    algorithm, module = Both(MLP(4, (5,), 3), lr=0.3, batch_size=8), data(MatchLabels(samples=13))
    loop = run(algorithm, module, 2, root=tmp_path).trainer.datamodule
    ids = np.array([4, 0, 6])
    clients = Clients(ids, 0, loop.client_data(torch.device("cpu")), "test")
    algorithm.load_state(clients)
    columns = predictions(algorithm, clients)
    start = 0
    for c in ids:
        index = torch.from_numpy(module.partition.test[c])
        x, y = module.samples.gather(index)
        part = slice(start, start + len(index))
        start += len(index)
        assert (columns["client"][part] == c).all()
        assert (columns["sample"][part] == index.numpy()).all()
        assert (columns["target"][part] == y.numpy()).all()
        own = algorithm.store.read("w", np.array([c]))[0]
        for kind, w in (("global", algorithm.global_model), ("personalized", own)):
            with torch.no_grad():
                expected = put(algorithm.network, w).eval()(x.double()).argmax(1)
            assert (columns[kind][part] == expected.numpy()).all()
    assert all(len(column) == start for column in columns.values())


def test_predicted_values_of_a_regression(tmp_path):
    algorithm, module = FedAvg(MLP(4, (5,), 1), lr=0.05), data(SplitOwn(), regression=True)
    loop = run(algorithm, module, 2, root=tmp_path).trainer.datamodule
    clients = Clients(np.array([1]), 0, loop.client_data(torch.device("cpu")), "test")
    algorithm.load_state(clients)
    columns = predictions(algorithm, clients)
    x, y = module.samples.gather(torch.from_numpy(module.partition.test[1]))
    with torch.no_grad():
        expected = put(algorithm.network, algorithm.global_model).eval()(x.double())
    np.testing.assert_allclose(columns["target"], y.numpy())
    # Predictions have one value a sample, as the targets have.
    assert columns["global"].shape == columns["target"].shape
    np.testing.assert_allclose(columns["global"], expected.view(-1).numpy(), rtol=1e-6)


class Constant(nn.Module):
    """Always answers with its parameter."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(torch.tensor([0.0, 1.0, 0.0]))

    def forward(self, x):
        return self.scores.expand(len(x), -1)


def test_accuracy_by_hand(tmp_path):
    """A model that always says class 1 is right on exactly the share of class 1."""
    x = torch.zeros(12, 1)
    y = torch.tensor([0, 1, 1, 2, 1, 0, 1, 1, 2, 1, 1, 1])
    kwargs = {"client_ids": np.arange(12) // 4, "num_clients": 3}
    module = TensorDataModule(x, y, x[:4], y[:4], protocol=SharedTest(validation=0), **kwargs)
    algorithm = FedAvg(Constant(), lr=1e-9)
    run(algorithm, module, 2, root=tmp_path)
    assert (algorithm.evaluation.scores["test", "global"]["accuracy"] == 0.5).all()
    assert algorithm.row["test/global/accuracy"] == 0.5
    # cross entropy: log(e^0 + e^1 + e^0) - score of the right class, 0 or 1 (half each)
    expected = math.log(2 + math.e) - 0.5
    assert algorithm.row["test/global/loss"] == pytest.approx(expected, abs=1e-6)
