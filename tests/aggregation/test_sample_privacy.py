"""Sample-level privacy: gradients by hand, mini-batches, noise, counts, and what is refused."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from pfl import ConfigError
from pfl.aggregation.accountant import Accountant
from pfl.aggregation.privacy import SamplePrivacy
from pfl.algorithms import (
    APFL,
    IFCA,
    MOON,
    SCAFFOLD,
    Ditto,
    FedAvg,
    FedBABU,
    FedPAC,
    LocalTrain,
    PerFedAvg,
)
from pfl.clients import ClientData, Clients, LocalSchedule
from pfl.method import remarks
from pfl.models import HalfSquaredError
from tests.algorithms.methods import BATCHES, SIZES, normalized_network, small_network, small_world
from tests.problems import least_squares, owned

FREE = SamplePrivacy(clip=1e9, noise_multiplier=0.0, delta=0.1, reproducible=True)


def private(**arguments):
    settings = {"clip": 1.0, "noise_multiplier": 1.0, "reproducible": True}
    return SamplePrivacy(**{**settings, **arguments})


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"clip": 0.0}, "loop.sample_privacy.clip: 0.0; it must be positive"),
        ({"noise_multiplier": -1.0}, "loop.sample_privacy.noise_multiplier: -1.0; it must be at"),
        ({"noise_multiplier": math.inf}, "loop.sample_privacy.noise_multiplier: inf; it must be"),
        ({"delta": 0.0}, "loop.sample_privacy.delta: 0.0; it must be positive and below 1"),
        ({"delta": 1.0}, "loop.sample_privacy.delta: 1.0; it must be positive and below 1"),
    ],
)
def test_impossible_arguments_are_refused(arguments, line):
    with pytest.raises(ConfigError) as error:
        private(**arguments)
    assert str(error.value).startswith(line)


def test_epsilon_of_each_client_in_any_order():
    """Clients of 8, 3, 8 and no samples, with 5, 2, 5 and 0 gradients of 4 expected samples, and
    one that has taken none."""
    sizes = np.array([8, 3, 8, 0, 3])
    counts = np.array([5, 2, 5, 0, 0])
    found = SamplePrivacy(1.0, 2.0).epsilons(sizes, counts, batch_size=4)
    of_eight = Accountant(2.0, 8**-1.1, "bernoulli", 4, 8).epsilon(5)
    of_three = Accountant(2.0, 3**-1.1, "bernoulli", 3, 3).epsilon(2)
    np.testing.assert_allclose(found, [of_eight, of_three, of_eight, 0.0, 0.0], rtol=1e-12)
    whole = SamplePrivacy(1.0, 2.0).epsilons(sizes[:1], counts[:1], batch_size=None)
    assert whole == [Accountant(2.0, 8**-1.1, "bernoulli", 8, 8).epsilon(5)]
    public = SamplePrivacy(1.0, 2.0, reproducible=True).epsilons(sizes, counts, 4)
    assert public.tolist() == [math.inf, math.inf, math.inf, 0.0, 0.0]


def batches_of(sizes, batch_size, rounds=1, epochs=1, seed=0):
    """The samples of each Poisson mini-batch: [(round, step, client), ids of the samples]."""
    ids = np.repeat(np.arange(len(sizes)), sizes)
    data = owned(
        ids,
        torch.arange(len(ids), dtype=torch.float64)[:, None],
        torch.zeros(len(ids), dtype=torch.float64),
    )
    data.setup()
    found = {}
    samples = ClientData(data, seed=seed)
    samples.draw_poisson_samples(0)
    for index in range(rounds):
        clients = Clients(np.arange(len(sizes)), index, samples, dtype=torch.float64)
        schedule = LocalSchedule(batch_size, epochs)
        for step, batch in enumerate(clients.batches(schedule)):
            for row, count in enumerate(batch.counts):
                found[index, step, row] = batch.inputs[row, :count, 0].int().tolist()
    return found


def test_each_sample_is_drawn_on_its_own():
    """Of 40 samples with an expected 8, each is in a fifth of the mini-batches; pairs in 1/25."""
    found = batches_of([40, 5], 8, rounds=200)
    large = [ids for (_, _, client), ids in found.items() if client == 0]
    assert len(large) == 200 * 5  # ceil(40 / 8) steps an epoch
    member = np.zeros((len(large), 40))
    for row, ids in enumerate(large):
        assert len(set(ids)) == len(ids)
        member[row, ids] = 1
    deviation = math.sqrt(0.2 * 0.8 / len(large))
    assert np.abs(member.mean(0) - 0.2).max() < 4.5 * deviation
    both = (member.T @ member / len(large))[np.triu_indices(40, 1)]
    assert np.abs(both - 0.04).max() < 5 * math.sqrt(0.04 * 0.96 / len(large))
    # The number of samples is binomial: 40 draws with the probability 1/5.
    counts = np.bincount([len(ids) for ids in large], minlength=41)[:41]
    expected = stats.binom.pmf(np.arange(41), 40, 0.2) * len(large)
    chi = ((counts - expected)[3:14] ** 2 / expected[3:14]).sum()
    assert chi < stats.chi2.ppf(0.999, 11)
    # A client with fewer samples than the batch takes all of them, in its one step.
    assert all(len(ids) == 5 for (_, _, client), ids in found.items() if client == 1)


def test_mini_batches_may_be_empty_and_the_step_is_taken(fit):
    found = batches_of([12], 1, rounds=20)
    assert any(not ids for ids in found.values())
    method = FedAvg(small_network(), loss=HalfSquaredError(), lr=0.1, batch_size=1)
    fit(method, small_world(), 3, sample_privacy=private(), evaluate=())
    assert method.global_model.isfinite().all()


@pytest.mark.parametrize("clip", [0.3, 1e9])
@pytest.mark.parametrize("chunk", [3, 1])
def test_a_gradient_step_by_hand(fit, clip, chunk):
    """Sample by sample in NumPy: clipped, summed, over the expected size, for two steps."""
    problem, lr = least_squares([9, 6, 4]), 0.1
    method = FedAvg(problem.network(0.2), loss=HalfSquaredError(), lr=lr, batch_size=4)
    privacy = private(clip=clip, noise_multiplier=0.0)
    fit(method, problem, 1, sample_privacy=privacy, evaluate=(), clients_at_once=chunk)
    taken, starts = batches_of([9, 6, 4], 4), np.array([0, 9, 15])
    models = []
    for client, size in enumerate([9, 6, 4]):
        w = np.full(problem.size, 0.2)
        for step in range(-(-size // 4)):
            total = np.zeros_like(w)
            for sample in taken[0, step, client]:
                g = problem.gradient(client, w, [sample - starts[client]])
                total += g * min(1.0, clip / np.linalg.norm(g))
            w = w - lr * total / min(4, size)
        models.append(w)
    expected = np.average(models, axis=0, weights=[9, 6, 4])
    np.testing.assert_allclose(method.global_model, expected, rtol=0, atol=1e-13)


def test_all_samples_without_noise_are_full_gradients(fit):
    arguments = dict(loss=HalfSquaredError(), lr=0.2, local_epochs=3, batch_size=None)
    for kind in (FedAvg, SCAFFOLD, Ditto):
        plain, free = (kind(small_network(), **arguments) for _ in range(2))
        fit(plain, small_world(), 3, evaluate=())
        fit(free, small_world(), 3, evaluate=(), sample_privacy=FREE)
        torch.testing.assert_close(plain.global_model, free.global_model, rtol=0, atol=1e-13)


def test_the_noise_of_a_step(fit):
    """LocalTrain with clipped gradients of size 0: w moves by lr z C N / n in every step."""

    class Nothing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(5000, dtype=torch.float64))

        def forward(self, inputs):
            return inputs[:, :2] + 0 * self.weight.sum()

    method = LocalTrain(Nothing(), lr=0.5, batch_size=None, loss=HalfSquaredError())
    fit(method, small_world(), 2, sample_privacy=private(clip=0.2, noise_multiplier=3.0))
    moved = method.client_rows("w", np.arange(4)).numpy()
    noise = moved * np.array(SIZES)[:, None] / (0.5 * 3.0 * 0.2 * math.sqrt(2))  # two steps
    assert stats.kstest(noise.ravel(), "norm").pvalue > 0.01
    assert np.abs(np.corrcoef(noise)[np.triu_indices(4, 1)]).max() < 4 / math.sqrt(5000)


def test_epsilon_counts_the_gradients_of_each_client(fit):
    """Sizes 5, 1, 4, 2 in batches of 2: rates 2/5, 1, 1/2, 1, and 3, 1, 2, 1 steps an epoch."""
    trace = [[0, 1, 2], [0, 3], [2]]
    method = Ditto(small_network(), loss=HalfSquaredError(), lr=0.1, batch_size=2, local_epochs=2)
    fit(
        method,
        small_world(),
        3,
        trace=trace,
        sample_privacy=private(delta=1e-2, reproducible=False),
    )
    # Two epochs of the model that is sent and one of the personal one.
    steps = [2 * 9, 1 * 3, 2 * 6, 1 * 3]
    expected = [
        Accountant(1.0, 1e-2, "bernoulli", min(2, n), n).epsilon(count)
        for n, count in zip(SIZES, steps, strict=True)
    ]
    np.testing.assert_allclose(method.sample_epsilons(), expected, rtol=1e-12)
    table = method.trainer.recorder.columns
    np.testing.assert_allclose(table["sample_epsilon"], expected, rtol=1e-6)
    assert method.trainer.recorder.summary["sample_epsilon"] == pytest.approx(max(expected))


def test_a_message_that_is_lost_counts(fit):
    """Client 0 trains in all three rounds, and fails in the second: who saw its message?"""
    found = []
    for dropout in (0.0, [[], [0], []]):
        method = Ditto(small_network(), loss=HalfSquaredError(), lr=0.1, batch_size=2)
        fit(method, small_world(), 3, dropout=dropout, sample_privacy=private(reproducible=False))
        found.append(method.sample_epsilons())
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("kind", [APFL, PerFedAvg, IFCA, MOON, FedPAC, FedBABU])
def test_methods_that_use_samples_otherwise_are_refused(fit, kind):
    with pytest.raises(ConfigError, match=r"^loop\.sample_privacy: "):
        data = small_world(classes=kind is FedPAC)
        fit(kind(small_network(), **BATCHES), data, 2, sample_privacy=private())


def test_statistics_fine_tuning_and_training_scores_are_refused(fit):
    without = normalized_network()  # running statistics; it still takes the means of batches
    without[2] = torch.nn.BatchNorm1d(2, track_running_stats=False).double()
    for network in (normalized_network(), without):
        with pytest.raises(ConfigError, match="running statistics mix samples"):
            fit(FedAvg(network, **BATCHES), small_world(), 1, sample_privacy=private())
    with pytest.raises(ConfigError, match=r"^loop\.finetune: \[1\]"):
        fit(
            FedAvg(small_network(), **BATCHES),
            small_world(),
            1,
            sample_privacy=private(),
            finetune=[1],
        )
    with pytest.raises(ConfigError, match=r"^loop\.evaluate: train; "):
        fit(
            FedAvg(small_network(), **BATCHES),
            small_world(),
            1,
            sample_privacy=private(),
            evaluate=["train"],
        )


def test_a_delta_that_is_too_large_is_told(fit, monkeypatch):
    """n^-1.1 is above 0.01 for n < 100^(1 / 1.1) = 65.8"""
    assert 65 < 100 ** (1 / 1.1) < 66

    def told(sizes, **arguments):
        """What is said of the δ of clients with these numbers of training samples."""
        return SamplePrivacy(1.0, 1.0, **arguments).doubt(np.array(sizes))

    assert told([1000, 66]) == "" and told([1000, 0, 66]) == "" and told([0, 1]) == ""
    assert told([1000, 65]) == (
        "loop.sample_privacy.delta: 0.01 for a client of 65 samples is so large that epsilon says "
        "little (give loop.sample_privacy.delta a value far below 1 / 65, such as 1e-5)"
    )
    assert told([3], delta=1e-5) == "" and told([3], reproducible=True) == ""
    assert "0.02 for a client of 1000 samples" in told([1000], delta=0.02)
    lines = []
    monkeypatch.setattr(remarks, "tell", lines.append)
    algorithm = FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES)
    fit(algorithm, small_world(), 1, sample_privacy=SamplePrivacy(1.0, 1.0), evaluate=())
    smallest = min(size for size in SIZES if size > 1)
    assert lines == [told([smallest])] and lines[0]
