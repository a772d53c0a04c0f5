"""Client-level privacy: how far one client moves what the server sees, the noise, and ε."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from datamodules import SharedTest
from models import HalfSquaredError
from pfl import ConfigError, FederatedLoop
from pfl.aggregation.accountant import Accountant
from pfl.aggregation.privacy import AdaptiveClip, Privacy, PrivateMean
from pfl.algorithms import SCAFFOLD, FedAvg, FedCLUP
from pfl.method import remarks
from pfl.randomness import Seeded, generator
from tests.aggregation.gaussian import gaussian_delta
from tests.algorithms.methods import (
    BATCHES,
    METHODS,
    SIZES,
    normalized_network,
    small_network,
    small_world,
)
from tests.problems import owned, quiet
from tests.refusal import refused

# The server of these reads the messages of single clients or their products, or has the samples.
REFUSED = {
    *("FedACS", "FedACS, quantile 1", "FedAMP", "HeurFedAMP", "FedGH", "FedPAC", "GlobalTrain"),
    *("CFL", "Floco", "pFedHN", "FedBuff", "FedAsync", "FedExLoRA", "FLoRA", "FlexLoRA"),
    *("FedSLR, all multipliers", "FedDistill", "FedTGP", "FedFomo", "APPLE", "FedDF"),
}
CLIP = 1e-3  # below the norm of every client's messages, which are then moved by C exactly
EXACT = Privacy(clip=CLIP, noise_multiplier=0.0, delta=0.1, reproducible=True)


def world_with(client):
    """The small world, in which one client has other targets."""
    data = small_world()
    loaded = data.load()
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    targets = loaded.train.targets.clone()
    targets[owners == client] += 3.0
    return owned(
        owners,
        loaded.train.inputs,
        targets,
        loaded.test.inputs,
        loaded.test.targets,
        protocol=SharedTest(validation=0.0),
    )


class Transcript:
    """Replaces `PrivateMean.release`: keeps the sums of every round, and replays the means."""

    def __init__(self, patch):
        self.patch = patch

    def record(self, run, means=()):
        """Runs something; returns the sums and the released means of each round.

        Args:
            run: What is run.
            means: What the server learns in place of its own means.
        """
        release, sums, released = PrivateMean.release, [], []

        def recorded(private, totals, references, index):
            sums.append({name: total.clone() for name, total in totals.items()})
            own = release(private, totals, references, index)
            released.append(means[index] if means else own)
            return {name: mean.clone() for name, mean in released[-1].items()}

        with self.patch.context() as patch:
            patch.setattr(PrivateMean, "release", recorded)
            run()
        return sums, released


@pytest.fixture
def transcript(monkeypatch):
    return Transcript(monkeypatch)


def distance(one, other):
    """The norm of the difference of all sums of a round together."""
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one))


def ran_with(method, fit, data, **loop):
    algorithm = method.make(small_network(), **BATCHES)
    return lambda: fit(algorithm, data, 2, evaluate=(), privacy=EXACT, **loop)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in REFUSED])
def test_one_client_moves_the_sums_by_at_most_the_clip(fit, transcript, name):
    """The server's sums with and without a client, if both servers have published the same.

    The second round counts as much as the first: there the other clients have states and models
    that could depend on the client in another way than through what was published.
    """
    method = METHODS[name]
    if method.everyone:  # one client is replaced, which takes its part away and adds another
        runs, limit = [{"data": small_world()}, {"data": world_with(1)}], 2 * CLIP
    else:
        # The third round, which is not run, gives both the same expected number of clients.
        # Client 1 has one class, of which FedLC and FedRoD learn nothing.
        left_out = 0 if method.classes else 1
        cohorts = [[0, 1, 2], sorted([left_out, 2, 3]), [0, 1, 2]]
        without = [[i for i in cohort if i != left_out] for cohort in cohorts[:2]] + cohorts[2:]
        data = small_world(classes=method.classes)
        runs, limit = [{"data": data, "trace": t} for t in (cohorts, without)], CLIP
    with_client, published = transcript.record(ran_with(method, fit, **runs[0]))
    without_client, _ = transcript.record(ran_with(method, fit, **runs[1]), published)
    moved = [distance(*both) for both in zip(with_client, without_client, strict=True)]
    assert max(moved) <= limit * (1 + 1e-9)
    if name != "LocalTrain" and not method.everyone:  # in the first round norms exceed the clip
        assert moved[0] == pytest.approx(limit, rel=1e-9)
    assert [len(sums) > 0 for sums in with_client] == [name != "LocalTrain"] * 2


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_methods_that_read_single_clients_are_refused(fit, name):
    method = METHODS[name]
    with pytest.raises(ConfigError, match=r"^loop\.privacy: "):
        ran_with(method, fit, small_world(classes=method.classes))()


# ---- what is refused ----------------------------------------------------------------------------


def private(**arguments):
    settings = {"clip": 1.0, "noise_multiplier": 1.0, "reproducible": True}
    return Privacy(**{**settings, **arguments})


@pytest.mark.parametrize(
    ("hook", "found"),
    [
        ("server_update", "server_update reads self.participant_ids"),
        ("after_evaluation", "after_evaluation reads 'test/global/loss'"),
    ],
)
def test_hooks_that_read_what_is_not_private_are_refused(fit, hook, found):
    class Reads(FedAvg):
        def server_update(self, received):
            if hook == "server_update":
                assert len(self.participant_ids)
            super().server_update(received)

        def after_evaluation(self, row):
            if hook == "after_evaluation":
                assert row["test/global/loss"] >= 0

    algorithm = Reads(small_network(), loss=HalfSquaredError(), **BATCHES)
    with pytest.raises(ConfigError, match=rf"^loop\.privacy: Reads\.?.*{found}|{found}"):
        fit(algorithm, small_world(), 1, privacy=private())


def test_a_rule_that_follows_validation_losses_is_refused(fit):
    method = FedCLUP(small_network(), penalty_schedule="plateau", lr=0.1, batch_size=None)
    with pytest.raises(ConfigError, match=r"^loop\.privacy: model\.penalty_schedule: plateau"):
        fit(method, small_world(), 1, privacy=private())


def test_running_statistics_are_not_averaged_in_private_runs(fit):
    arguments = dict(loss=HalfSquaredError(), **BATCHES)
    with pytest.raises(ConfigError, match=r"^loop\.privacy: model\.buffers: average"):
        fit(FedAvg(normalized_network(), **arguments), small_world(), 1, privacy=private())
    fit(
        FedAvg(normalized_network(), buffers="local", **arguments),
        small_world(),
        1,
        privacy=private(),
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"clip": 0.0}, "loop.privacy.clip: 0.0; it must be positive"),
        ({"noise_multiplier": -1.0}, "loop.privacy.noise_multiplier: -1.0; it must be at least 0"),
        ({"delta": 1.0}, "loop.privacy.delta: 1.0; it must be positive and below 1"),
        ({"delta": 0.0}, "loop.privacy.delta: 0.0; it must be positive and below 1"),
        ({"epsilon": 0.0}, "loop.privacy.epsilon: 0.0; it must be positive"),
        ({"bands": 0}, "loop.privacy.bands: 0; it must be a whole number of at least 1"),
        (
            {"bands": 2, "adaptive": AdaptiveClip()},
            "loop.privacy.bands: 2; noise over rounds needs a clip that stays",
        ),
        ({"noise_multiplier": None}, "loop.privacy: give noise_multiplier, or epsilon, from which"),
    ],
)
def test_impossible_arguments_are_refused(arguments, line):
    with pytest.raises(ConfigError) as error:
        private(**arguments)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"quantile": 0.0}, "loop.privacy.adaptive.quantile: 0.0; it must be positive and below 1"),
        ({"quantile": 1.0}, "loop.privacy.adaptive.quantile: 1.0; it must be positive and below 1"),
        ({"rate": 0.0}, "loop.privacy.adaptive.rate: 0.0; it must be positive"),
    ],
)
def test_impossible_adaptive_clips_are_refused(arguments, line):
    with pytest.raises(ConfigError) as error:
        AdaptiveClip(**arguments)
    assert str(error.value).startswith(line)


# ---- the mean -----------------------------------------------------------------------------------


def test_without_noise_and_with_a_wide_clip_the_method_is_itself(fit, tmp_path):
    """The mean of the changes plus the received model is the mean of the models."""
    arguments = dict(weighting="uniform", loss=HalfSquaredError(), **BATCHES)
    plain, wide = (FedAvg(small_network(), **arguments) for _ in range(2))
    fit(plain, small_world(), 4, clients_per_round=2)
    fit(
        wide, small_world(), 4, clients_per_round=2, privacy=private(clip=1e9, noise_multiplier=0.0)
    )
    torch.testing.assert_close(plain.global_model, wide.global_model, rtol=0, atol=1e-14)


def mean_of(privacy, rounds=(0,), width=4000, seed=0, cohort=8, rows=None):
    """What `PrivateMean` releases of clients that send zeros, or `rows`, in some rounds."""
    accountant = Accountant(privacy.noise_multiplier, 1e-5, "bernoulli", cohort, 100)
    mean = PrivateMean(privacy, accountant, Seeded(seed), max(rounds) + 1)
    values = torch.zeros(cohort, width, dtype=torch.float64) if rows is None else rows
    sums = [mean.release(mean.sums({"w": values}, {}), {}, index)["w"] for index in rounds]
    return torch.stack(sums), mean


def test_the_noise_is_gaussian_with_the_promised_deviation():
    """Of the mean: z C / cohort = 2 * 0.5 / 8; uncorrelated between values and between rounds."""
    means, _ = mean_of(private(clip=0.5, noise_multiplier=2.0), rounds=range(10))
    noise = means / 0.125
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 0.01
    assert abs(noise.mean()) < 4 / math.sqrt(noise.numel())
    assert abs(noise.std() - 1) < 4 / math.sqrt(2 * noise.numel())
    between = np.corrcoef(noise.numpy())[np.triu_indices(10, 1)]
    assert np.abs(between).max() < 4.5 / math.sqrt(noise.shape[1])
    neighbours = torch.corrcoef(torch.stack([noise[:, 1:].flatten(), noise[:, :-1].flatten()]))
    assert abs(neighbours[0, 1]) < 4 / math.sqrt(noise.numel())


def test_the_noise_is_a_function_of_seed_and_round():
    one, _ = mean_of(private(), rounds=(0, 3))
    again, _ = mean_of(private(), rounds=(3,))
    other, _ = mean_of(private(), rounds=(3,), seed=1)
    assert torch.equal(one[1], again[0])
    assert not torch.equal(one[1], other[0]) and not torch.equal(one[0], one[1])


def test_all_messages_are_clipped_together_and_bad_ones_count_as_zero():
    """|(3, 4, 12)| = 13 is scaled to 2; a norm of 1 stays; infinity and NaN become nothing."""
    accountant = Accountant(0.0, 1e-5, "bernoulli", 4, 100)
    mean = PrivateMean(private(clip=2.0, noise_multiplier=0.0), accountant, Seeded(0), 1)
    a = torch.tensor([[4.0, 4.0], [1.0, 0.0], [math.inf, 0.0], [1.0, 0.0]])
    b = torch.tensor([[12.0], [0.0], [0.0], [math.nan]])
    reference = {"a": torch.tensor([1.0, 0.0])}
    sums = mean.sums({"a": a, "b": b}, reference)
    # Rows minus the reference: (3, 4, 12) -> 2/13 of it; (0, 0, 0); nothing; nothing.
    torch.testing.assert_close(sums["a"], torch.tensor([6.0, 8.0]) / 13)
    torch.testing.assert_close(sums["b"], torch.tensor([24.0]) / 13)
    released = mean.release(sums, reference, 0)  # over four expected clients, plus the reference
    torch.testing.assert_close(released["a"], torch.tensor([6.0, 8.0]) / 52 + reference["a"])


def test_messages_beyond_float32_are_clipped():
    """|(3, 4) 1e30| has no square in float32."""
    rows = torch.tensor([[3e30, 4e30]], dtype=torch.float64)
    released, _ = mean_of(private(clip=10.0, noise_multiplier=0.0), cohort=1, rows=rows)
    assert released[0].tolist() == pytest.approx([6.0, 8.0])


@pytest.mark.parametrize("quantile", [0.3, 0.8])
def test_an_adaptive_clip_finds_the_quantile(quantile):
    """Norms are 1, 2, ..., 200, so that the quantile γ is 200 γ."""
    rows = torch.zeros(200, 3, dtype=torch.float64)
    rows[:, 0] = torch.arange(1, 201)
    adaptive = AdaptiveClip(quantile=quantile, rate=0.5)
    _, mean = mean_of(private(clip=1.0, adaptive=adaptive), range(60), 3, cohort=200, rows=rows)
    # The count has noise 10 of 200; the clip then moves by 0.5 * 0.05 of itself a round at most
    # or so, and the slope of the share around the quantile pulls it back.
    assert mean.clip == pytest.approx(200 * quantile, rel=0.2)
    # Theorem 1: z^-2 = z_messages^-2 + (2 σ_b)^-2.
    assert mean.message_noise**-2 + (2 * mean.count_noise) ** -2 == pytest.approx(1.0)
    assert mean.message_noise > 1


@pytest.mark.parametrize(
    ("z", "cohort", "noise"),
    [
        (2.0, 8, 2.0),  # a twentieth of 8 clients is less than the noise multiplier
        (2.0, 80, 4.0),
        (0.5, 200, 10.0),
    ],
)
def test_messages_and_their_count_share_the_noise(z, cohort, noise):
    """z^-2 = z_messages^-2 + (2 σ_b)^-2: for z = 2 and σ_b = 4, 1/4 - 1/64 = 15/64."""
    made = private(noise_multiplier=z, adaptive=AdaptiveClip())
    _, mean = mean_of(made, cohort=cohort, width=1)
    assert mean.count_noise == noise
    assert mean.message_noise == pytest.approx((1 / z**2 - 1 / (4 * noise**2)) ** -0.5, rel=1e-14)


def test_an_adaptive_clip_moves_by_the_share_below_it():
    """Of norms 1, 2, 3, 4 two are at most the clip 2, without noise. C <- 2 exp(-0.5 (2/4 - 0.9))
    for the quantile 0.9; with an expected cohort of 8, 2 - 4/2 of 8 more than a half: the same."""
    rows = torch.diag(torch.arange(1.0, 5.0, dtype=torch.float64))
    for cohort in (4, 8):
        made = private(clip=2.0, noise_multiplier=0.0, adaptive=AdaptiveClip(0.9, rate=0.5))
        _, mean = mean_of(made, cohort=cohort, rows=rows)
        assert mean.clip == pytest.approx(2.0 * math.exp(-0.5 * (0.5 - 0.9)), rel=1e-14)


def test_an_empty_round_happens_and_has_noise(fit):
    """Each of four clients is drawn with probability 1/4; noise moves the model all the same."""
    algorithm = FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES)
    before = algorithm.global_model.clone()
    seed = next(s for s in range(99) if (generator(s, "cohort", 0).random(4) >= 0.25).all())
    loop = dict(sampling="bernoulli", clients_per_round=1, privacy=private(), seed=seed)
    fit(algorithm, small_world(), 1, **loop)
    assert algorithm.cohort(0).tolist() == []
    noise = torch.from_numpy(generator(seed, "privacy", 0).standard_normal(len(before)))
    torch.testing.assert_close(algorithm.global_model, before + noise, rtol=0, atol=1e-15)
    assert algorithm.participants == 1  # as expected, whoever came


def test_sums_and_noise_are_divided_by_the_expected_cohort(fit):
    """One of the expected four clients comes: a quarter of its change, and of noise z C."""
    alone, one, noisy = (FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES) for _ in "123")
    start = alone.global_model.clone()
    fit(alone, small_world(), 1, trace=[[2]])
    for method, z in ((one, 0.0), (noisy, 0.5)):
        wide = private(clip=1e3, noise_multiplier=z)
        fit(method, small_world(), 1, trace=[[2], [0, 1, 2, 3]], privacy=wide)
    quarter = start + (alone.global_model - start) / 4
    torch.testing.assert_close(one.global_model, quarter, rtol=0, atol=1e-14)
    noise = torch.from_numpy(generator(0, "privacy", 0).standard_normal(len(start)))
    torch.testing.assert_close(noisy.global_model, quarter + 0.5e3 * noise / 4, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 3])
def test_chunks_and_a_resumed_run_give_the_same(fit, tmp_path, chunk):
    settings = dict(clients_per_round=2, privacy=private(clip=0.1, adaptive=AdaptiveClip()))
    whole = SCAFFOLD(small_network(), loss=HalfSquaredError(), **BATCHES)
    fit(whole, small_world(), 4, **settings)
    part = SCAFFOLD(small_network(), loss=HalfSquaredError(), **BATCHES)
    trainer = quiet(tmp_path, 2, name="part")
    loop = dict(settings, clients_at_once=chunk)
    trainer.fit(part, datamodule=FederatedLoop(small_world(), **loop))
    resumed = SCAFFOLD(small_network(1), loss=HalfSquaredError(), **BATCHES)
    path = trainer.run_dir / "checkpoints" / "last.ckpt"
    rest = quiet(tmp_path, 4, name="rest")
    rest.fit(resumed, datamodule=FederatedLoop(small_world(), **loop), ckpt_path=str(path))
    torch.testing.assert_close(resumed.global_model, whole.global_model, rtol=0, atol=1e-14)
    assert resumed.run.private.clip == pytest.approx(whole.run.private.clip, rel=1e-14)
    assert resumed.row["privacy/epsilon"] == whole.row["privacy/epsilon"] == math.inf


def continued(root, rounds, path=None, **privacy):
    """A private run, perhaps from a checkpoint, and the path of its own."""
    loop = FederatedLoop(small_world(), evaluate=(), privacy=Privacy(**privacy))
    method = FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES)
    trainer = quiet(root, rounds, limit_val_batches=0, enable_checkpointing=True)
    trainer.fit(method, datamodule=loop, ckpt_path=path)
    return method, str(trainer.run_dir / "checkpoints" / "last.ckpt")


OTHER_SETTINGS = "ignore:From round . on the run has other settings"


@pytest.mark.filterwarnings(OTHER_SETTINGS)
def test_more_rounds_do_not_thin_out_what_earlier_ones_have_revealed(tmp_path):
    """A budget for two rounds needs less noise than one for four, of which two are over."""
    budget = dict(clip=0.1, epsilon=5.0, delta=1e-5)
    first, path = continued(tmp_path / "first", 2, **budget)
    z = Accountant(0.0, 1e-5, "all", 4, 4).calibrate(5.0, 2).noise_multiplier
    assert first.row["privacy/epsilon"] == pytest.approx(5.0, rel=1e-3)
    with refused("ckpt_path: ", f" the noise multiplier {z!r} and 4 of 4 clients each"):
        continued(tmp_path / "more", 4, path, **budget)
    rest, _ = continued(tmp_path / "rest", 4, path, clip=0.1, noise_multiplier=z, delta=1e-5)
    expected = Accountant(z, 1e-5, "all", 4, 4).epsilon(4)
    assert rest.row["privacy/epsilon"] == pytest.approx(expected, rel=1e-12) and expected > 5.0


@pytest.mark.filterwarnings(OTHER_SETTINGS)
def test_a_run_goes_on_with_another_clip_and_with_less_noise(tmp_path):
    """Without noise each of four clients moves the mean by a quarter of the clip. Less noise than
    the rounds so far have had is counted for all of them, which is a bound."""
    first, path = continued(tmp_path / "first", 1, clip=1e-3, noise_multiplier=0.0)
    start = first.global_model.clone()
    rest, _ = continued(tmp_path / "rest", 2, path, clip=1e-4, noise_multiplier=0.0)
    assert 0 < float((rest.global_model - start).norm()) <= 1e-4 * (1 + 1e-9)
    _, path = continued(tmp_path / "noisy", 1, clip=1e-3, noise_multiplier=4.0, delta=1e-5)
    rest, _ = continued(tmp_path / "less", 2, path, clip=1e-3, noise_multiplier=2.0, delta=1e-5)
    expected = Accountant(2.0, 1e-5, "all", 4, 4).epsilon(2)
    assert rest.row["privacy/epsilon"] == pytest.approx(expected, rel=1e-12)


# ---- a budget, and δ -----------------------------------------------------------------------------


def test_the_noise_follows_from_a_budget_and_a_budget_ends_a_run(fit):
    algorithm = FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES)
    loop = dict(clients_per_round=2, sampling="bernoulli", evaluate=())
    fit(
        algorithm,
        small_world(),
        6,
        privacy=private(noise_multiplier=None, epsilon=3.0, reproducible=False),
        **loop,
    )
    assert algorithm.row["privacy/epsilon"] == pytest.approx(3.0, rel=1e-3)
    assert algorithm.row["privacy/epsilon"] <= 3.0 and algorithm.rounds == 6
    z = algorithm.run.private.noise_multiplier
    ends = FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES)
    fit(ends, small_world(), 60, privacy=private(noise_multiplier=z, epsilon=3.0), **loop)
    assert ends.rounds == 6
    with pytest.raises(ConfigError, match=r"loop\.privacy\.epsilon: 0\.1; the first round alone"):
        fit(ends, small_world(), 6, privacy=private(epsilon=0.1), **loop)


def test_a_delta_that_is_too_large_is_told(fit, monkeypatch):
    """Without one it is M^-1.1 for M clients: 4^-1.1 = exp(-1.1 log 4) = 0.22."""
    line = (
        "loop.privacy.delta: {} is so large that epsilon says little (give loop.privacy.delta a "
        "value far below 1 / 4, such as 1e-5)"
    )
    assert round(math.exp(-1.1 * math.log(4)), 2) == 0.22

    def told(**arguments):
        """The lines about δ of a run of a round, and what it says of its privacy."""
        lines = []
        monkeypatch.setattr(remarks, "tell", lines.append)
        algorithm = FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES)
        fit(algorithm, small_world(), 1, privacy=private(**arguments), evaluate=())
        return lines, algorithm.run.private.describe()

    lines, words = told(reproducible=False)
    assert lines == [line.format("0.22")]
    assert words.startswith(f"delta 0.22, which is {line.partition(' is ')[2]}, one client more")
    lines, _ = told(reproducible=False, delta=0.02)
    assert lines == [line.format("0.02")]
    lines, words = told(reproducible=False, delta=0.01)
    assert lines == [] and words.startswith("delta 0.01, one client more")
    lines, words = told()  # where nothing is private, δ means nothing
    assert lines == [] and words.startswith("reproducible: ")


# ---- noise over rounds --------------------------------------------------------------------------


def prefix_root(bands, rounds):
    """C by its definition: the banded root of the matrix of prefix sums, with columns of norm 1."""
    root = np.array([math.comb(2 * k, k) / 4**k for k in range(bands)])
    root /= np.sqrt((root**2).sum())
    matrix = np.zeros((rounds, rounds))
    for t in range(rounds):
        for s in range(max(0, t - bands + 1), t + 1):
            matrix[t, s] = root[t - s]
    return matrix


def test_one_band_is_independent_noise():
    plain, _ = mean_of(private(), rounds=range(3), width=50)
    banded, _ = mean_of(private(bands=1), rounds=range(3), width=50)
    assert torch.equal(plain, banded)


@pytest.mark.parametrize("bands", [2, 4])
def test_the_banded_factor_takes_the_noise_back_to_independent_draws(bands):
    """C x = z: what the rounds released, times C, is the noise that was drawn for each round."""
    rounds, width = 9, 40
    released, mean = mean_of(private(bands=bands), rounds=range(rounds), width=width)
    drawn = [generator(0, "privacy", t).standard_normal(width) for t in range(rounds)]
    actual = prefix_root(bands, rounds) @ (released.numpy() * mean.cohort)
    np.testing.assert_allclose(actual, drawn, rtol=0, atol=1e-12)
    # A process that begins with a later round, after a resume, releases the same.
    later, _ = mean_of(private(bands=bands), rounds=(7, 8), width=width)
    assert torch.equal(later, released[7:])
    # So does one that goes back to an earlier round.
    back, _ = mean_of(private(bands=bands), rounds=(5, 2), width=width)
    assert torch.equal(back, released[[5, 2]])


def test_sums_over_rounds_have_less_noise():
    """After b rounds its variance is that of the row sums of C^-1; of independent noise it is b."""
    bands = rounds = 8
    inverse = np.linalg.inv(prefix_root(bands, rounds))
    after = np.cumsum(inverse, 0)
    assert (after[-1] ** 2).sum() < rounds / 2
    released, mean = mean_of(private(bands=bands), rounds=range(rounds), width=20000)
    variance = float((released.sum(0) * mean.cohort).var())
    assert variance == pytest.approx((after[-1] ** 2).sum(), rel=0.05)


def test_clients_must_wait_for_their_next_turn(fit):
    def run(**loop):
        algorithm = FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES)
        return fit(algorithm, small_world(), 4, evaluate=(), **loop)

    line = (
        r"^loop\.privacy\.bands: 3; a client takes part again after 2 rounds; .*at most 1 clients"
    )
    with pytest.raises(ConfigError, match=line):
        run(privacy=private(bands=3), sampling="cyclic", clients_per_round=2)
    known = private(bands=2, reproducible=False)
    done = run(privacy=known, sampling="cyclic", clients_per_round=2)
    cohorts = [done.cohort(number).tolist() for number in range(4)]
    assert cohorts[:2] == cohorts[2:] and sorted(cohorts[0] + cohorts[1]) == [0, 1, 2, 3]
    # Two of four rounds for each client, of plain Gaussians.
    delta = done.run.private.accountant.delta
    assert done.row["privacy/epsilon"] == Accountant(1.0, delta, "all", 2, 4).epsilon(2)
    trace = [[0, 1], [2], [0], [1, 3]]
    run(privacy=private(bands=2), trace=trace)
    with pytest.raises(ConfigError, match="after 2 rounds"):
        run(privacy=private(bands=3), trace=trace)


# ---- an audit -----------------------------------------------------------------------------------


def audited(weights=None, runs=4000, z=1.0, delta=1e-5):
    """A lower bound of one round's ε, of which 99 % is certain, by guessing whether a client came.

    The canary sends a vector of norm C along the first axis; nine others send nothing. An attacker
    sees the released mean and says "it was there" above a threshold that was chosen on the first
    half of the runs. Clopper and Pearson bound the rates of both errors on the second half; a
    Gaussian mechanism with these rates has at least the sensitivity μ, and so at least the ε of μ
    (Nasr et al., "Tight Auditing of Differentially Private Machine Learning", 2023).

    Args:
        weights: The number of samples of each client, by which a planted mistake weighs them; None:
            what `PrivateMean` does.
    """
    accountant = Accountant(z, delta, "all", 10, 10)
    seen = np.empty((2, runs))
    for present in (0, 1):
        rows = torch.zeros(9 + present, 10, dtype=torch.float64)
        rows[0, 0] = present
        mean = PrivateMean(private(noise_multiplier=z), accountant, Seeded(present), 1)
        for number in range(runs):
            sums = mean.sums({"w": rows}, {})
            if weights is not None:
                samples = torch.tensor(weights[1 - present :], dtype=torch.float64)
                sums = {"w": 10 * (samples / samples.sum()) @ rows}
            seen[present, number] = float(mean.release(sums, {}, number)["w"][0])
    chosen, tested = np.split(seen, 2, axis=1)
    threshold = np.median(chosen)
    half = runs // 2
    errors = (tested[0] > threshold).sum(), (tested[1] <= threshold).sum()
    most = [stats.beta.ppf(0.995, wrong + 1, half - wrong) for wrong in errors]
    sensitivity = -stats.norm.ppf(most).sum()
    low, high = 0.0, 500.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        exceeds = gaussian_delta(middle, sensitivity) > delta
        low, high = (middle, high) if exceeds else (low, middle)
    return low


def test_an_audit_finds_less_than_the_accountant_and_more_than_half_of_it():
    epsilon = Accountant(1.0, 1e-5, "all", 10, 10).epsilon(1)
    assert epsilon / 2 < audited() < epsilon


def test_the_audit_finds_weights_by_samples():
    """A client of 991 samples beside nine of one moves the mean ten times as far as is assumed."""
    epsilon = Accountant(1.0, 1e-5, "all", 10, 10).epsilon(1)
    assert audited([991, *[1] * 9]) > 2 * epsilon
