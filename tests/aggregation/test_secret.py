"""What privacy rests on is drawn from a secret key: it follows from nothing that is written."""

import stat

import numpy as np
import pytest
import torch

from models import HalfSquaredError
from pfl import ConfigError, FederatedLoop
from pfl.aggregation.privacy import Privacy, SamplePrivacy
from pfl.algorithms import FedAvg
from pfl.method import set_up
from pfl.randomness import Secret, generator
from pfl.rounds.checkpoint_io import KEY_FILE, read_key
from tests.algorithms.methods import BATCHES, small_network, small_world
from tests.problems import quiet

NOISE = dict(clip=0.5, noise_multiplier=1.0)
ONE, OTHER = Secret(b"1" * 32), Secret(b"2" * 32)


def method():
    return FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES)


def trained(root, rounds, *, secret=None, ckpt_path=None, checkpoints=False, **loop):
    """A method after some rounds on the small world, and its run's folder."""
    federation = FederatedLoop(small_world(), evaluate=(), seed=3, **loop)
    if secret is not None:
        federation.take_secret(secret)
    saves = checkpoints or ckpt_path is not None
    trainer = quiet(root, rounds, enable_checkpointing=saves, limit_val_batches=0)
    algorithm = method()
    trainer.fit(algorithm, datamodule=federation, ckpt_path=ckpt_path)
    return algorithm


def test_draws_depend_on_the_key_the_purpose_and_the_round():
    draws = {
        (secret.key, purpose, number): secret.generator(purpose, number).standard_normal(4)
        for secret in (ONE, OTHER)
        for purpose in ("privacy", "cohort")
        for number in (0, 1)
    }
    assert len({tuple(values) for values in draws.values()}) == 8
    again = Secret(ONE.key).generator("cohort", 1).standard_normal(4)
    np.testing.assert_array_equal(again, draws[ONE.key, "cohort", 1])
    assert Secret().key != Secret().key


@pytest.mark.parametrize("level", ["privacy", "sample_privacy"])
def test_the_same_configuration_twice_has_other_noise(tmp_path, level):
    kind = {"privacy": Privacy, "sample_privacy": SamplePrivacy}[level]
    runs = [trained(tmp_path, 1, **{level: kind(**NOISE)}) for _ in range(2)]
    assert not torch.equal(runs[0].global_model, runs[1].global_model)
    equal = [trained(tmp_path, 1, secret=ONE, **{level: kind(**NOISE)}) for _ in range(2)]
    assert torch.equal(equal[0].global_model, equal[1].global_model)


def test_who_knows_the_seed_cannot_subtract_the_noise(tmp_path):
    """The attack that worked: a release minus the noise of (seed, round) was the exact sum."""
    exact = trained(tmp_path, 1, privacy=Privacy(clip=0.5, noise_multiplier=0.0))
    drawn = generator(3, "privacy", 0).standard_normal(26)
    known = torch.from_numpy(drawn) * 0.5 / 4  # z C / cohort
    attacked = {}
    for reproducible in (False, True):
        privacy = Privacy(**NOISE, reproducible=reproducible)
        release = trained(tmp_path, 1, privacy=privacy).global_model
        attacked[reproducible] = float((release - known - exact.global_model).abs().max())
    assert attacked[True] < 1e-14
    assert attacked[False] > 0.1  # two draws of deviation 0.125 in 26 values


def test_private_cohorts_do_not_follow_from_the_seed():
    def cohorts(**loop):
        arguments = dict(clients_per_round=2, sampling="bernoulli", seed=3, **loop)
        federation = FederatedLoop(small_world(), **arguments)
        federation.setup()
        return [federation.cohort(number).tolist() for number in range(40)]

    public = cohorts()
    assert cohorts() == public
    reproducible = cohorts(privacy=Privacy(**NOISE, reproducible=True))
    assert [a for a, b in zip(reproducible, public, strict=True) if a] == [
        b for a, b in zip(reproducible, public, strict=True) if a
    ]  # but for empty rounds, which a private run counts
    one, other = (cohorts(privacy=Privacy(**NOISE)) for _ in range(2))
    assert one != other and one != reproducible


def test_a_reproducible_run_says_that_epsilon_is_void(tmp_path):
    algorithm = trained(tmp_path, 1, privacy=Privacy(**NOISE, reproducible=True))
    assert algorithm.row["privacy/epsilon"] == np.inf
    assert algorithm.run.private.describe().startswith("reproducible: ")
    algorithm = trained(tmp_path, 1, sample_privacy=SamplePrivacy(**NOISE, reproducible=True))
    assert np.isinf(algorithm.sample_epsilons()).all()


# ---- where the key is ---------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["privacy", "sample_privacy"])
def test_a_run_goes_on_with_the_key_beside_its_checkpoint(tmp_path, level):
    kind = {"privacy": Privacy, "sample_privacy": SamplePrivacy}[level]
    whole = trained(tmp_path / "whole", 4, secret=ONE, **{level: kind(**NOISE)})
    part = trained(tmp_path, 2, secret=ONE, checkpoints=True, **{level: kind(**NOISE)})
    folder = part.trainer.run_dir / "checkpoints"
    resumed = trained(tmp_path, 4, ckpt_path=folder / "last.ckpt", **{level: kind(**NOISE)})
    assert torch.equal(resumed.global_model, whole.global_model)
    assert resumed.run.loop.secret.key == ONE.key


def test_only_the_owner_reads_the_key_and_it_is_nowhere_else(tmp_path):
    part = trained(tmp_path, 2, checkpoints=True, privacy=Privacy(**NOISE))
    folder = part.trainer.run_dir
    file = folder / "checkpoints" / KEY_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    key = part.run.loop.secret.key
    assert read_key(file) == key
    for path in folder.rglob("*"):
        if path.is_file() and path != file:
            content = path.read_bytes()
            assert key not in content and key.hex().encode() not in content, path
    plain = trained(tmp_path, 2, checkpoints=True)
    assert not list(plain.trainer.run_dir.rglob(KEY_FILE))


def test_a_key_that_is_missing_or_damaged_is_told(tmp_path):
    bands = dict(clients_per_round=2, sampling="cyclic", privacy=Privacy(**NOISE, bands=2))
    part = trained(tmp_path, 2, checkpoints=True, **bands)
    folder = part.trainer.run_dir / "checkpoints"
    (folder / KEY_FILE).write_text("abc\n")
    with pytest.raises(ConfigError, match=r"noise\.key is damaged; it must have 64 hex digits"):
        trained(tmp_path, 4, ckpt_path=folder / "last.ckpt", **bands)
    (folder / KEY_FILE).unlink()
    with pytest.raises(ConfigError, match=r"ckpt_path: noise\.key is not beside the checkpoint"):
        trained(tmp_path, 4, ckpt_path=folder / "last.ckpt", **bands)


def test_all_processes_have_the_key_of_the_first(monkeypatch):
    loop = FederatedLoop(small_world(), privacy=Privacy(**NOISE))
    own = loop.secret.key
    monkeypatch.setattr(set_up, "gather", lambda key: [ONE.key, key])
    set_up.share_secret(loop)
    assert loop.secret.key == ONE.key != own
    assert loop.participation.draws is loop.secret


@pytest.mark.filterwarnings("ignore:From round 2 on the run has other settings")
@pytest.mark.parametrize(
    ("noise_multiplier", "batch_size", "holds"),
    [(1.0, 2, True), (0.5, 3, True), (2.0, 2, False), (1.0, 1, False)],
)
def test_gradients_of_a_checkpoint_are_counted_with_their_own_noise(
    tmp_path, noise_multiplier, batch_size, holds
):
    """With more noise, or smaller mini-batches, the gradients so far would count for less."""
    trained(tmp_path, 1, checkpoints=True, sample_privacy=SamplePrivacy(**NOISE))
    (path,) = tmp_path.glob("**/last.ckpt")
    privacy = SamplePrivacy(clip=0.5, noise_multiplier=noise_multiplier)
    loop = FederatedLoop(small_world(), evaluate=(), seed=3, sample_privacy=privacy)
    again = FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES | {"batch_size": batch_size})
    trainer = quiet(tmp_path / "rest", 2, enable_checkpointing=True, limit_val_batches=0)
    if holds:
        trainer.fit(again, datamodule=loop, ckpt_path=str(path))
        assert again.rounds == 2
        return
    with pytest.raises(ConfigError, match=r"^ckpt_path: .*noise_multiplier: 1\.0 and .*: 2; "):
        trainer.fit(again, datamodule=loop, ckpt_path=str(path))
