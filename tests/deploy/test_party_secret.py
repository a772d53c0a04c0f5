"""The noise of a party comes from a key of its own, and what it keeps is for its owner alone."""

import os
import stat
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models import HalfSquaredError
from pfl import FederatedLoop
from pfl.aggregation.privacy import SamplePrivacy
from pfl.algorithms import FedAvg
from pfl.clients import Clients
from pfl.deploy.data import OwnSamples
from pfl.deploy.server import Remote, _Answer
from pfl.deploy.wire import pack, unpack
from pfl.deploy.worker import Worker, digest
from pfl.method.log import Log
from pfl.method.party import Party
from pfl.rounds.checkpoint_io import KEY_FILE, read_key
from pfl.stages.private import GRADIENTS
from tests.algorithms.methods import BATCHES, SIZES, small_network, small_world

CLIENT = 0
NOISE = dict(clip=0.5, noise_multiplier=1.0)
W = 0.6 * np.random.default_rng(6).normal(size=26)


def worker(folder, reproducible=False, steps=BATCHES, **noise):
    """The worker of client 0, as a process that starts with this folder has it."""

    def build(classes):
        data = OwnSamples(small_world(), CLIENT, len(SIZES), seed=0)
        privacy = SamplePrivacy(**NOISE | noise, reproducible=reproducible)
        loop = FederatedLoop(data, seed=3, sample_privacy=privacy)
        method = FedAvg(small_network(), loss=HalfSquaredError(), **steps)
        return Party(method, loop, CLIENT, 4, torch.float64)

    return Worker(CLIENT, {}, {}, build, folder)


def request(round_index=0, w=W, counted=None, run="one"):
    task = {"round": round_index, "received": {"w": w}, "personal": [], "work": 1.0}
    head = {"do": "train", "agreed": digest({}), "run": run, "classes": None, "keep": None}
    return pack(head | {"task": task | {"counted": counted}})


def sent(party, **task):
    answer = unpack(party.answer(request(**task)))
    assert "refused" not in answer, answer
    return answer["messages"]["w"][0]


def test_two_parties_with_one_configuration_have_different_noise(tmp_path):
    """Nothing of a key is a function of the seed, which both have, as everybody may."""
    one, other = (sent(worker(tmp_path / name)) for name in ("one", "other"))
    known = sent(worker(tmp_path / "known", reproducible=True))
    assert np.abs(one - other).min() > 0 and np.abs(one - known).min() > 0
    assert not list((tmp_path / "known").rglob(KEY_FILE))
    again = sent(worker(tmp_path / "again", reproducible=True))
    np.testing.assert_array_equal(known, again)


def test_a_worker_that_starts_again_goes_on_with_its_key(tmp_path):
    """The server goes on from a checkpoint after the first round, and asks for the second again."""
    party = worker(tmp_path)
    first = sent(party)
    second = sent(party, round_index=1, w=first[0], counted=0)
    begun = worker(tmp_path)
    np.testing.assert_array_equal(sent(begun, round_index=1, w=first[0], counted=0), second)
    np.testing.assert_array_equal(sent(worker(tmp_path)), first)


def test_each_run_has_a_key_of_its_own(tmp_path):
    party = worker(tmp_path)
    one, other = (sent(party, run=run) for run in ("one", "two"))
    assert np.abs(one - other).min() > 0
    keys = {read_key(path) for path in tmp_path.rglob(KEY_FILE)}
    assert len(keys) == 2


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_server_cannot_subtract_the_noise_of_one_round(tmp_path, reproducible):
    """It asks for a round twice, with models that differ by 1e-9 in one value.

    With the same noise and the same mini-batches, the answers differ by some 1e-9 as well: their
    difference shows how the gradients without noise change with the model.
    """
    party = worker(tmp_path, reproducible=reproducible)
    near = W.copy()
    near[0] += 1e-9
    one, other = sent(party), sent(party, w=near)
    difference = np.abs(one - other).max()
    if reproducible:
        assert difference < 1e-7
    else:
        assert difference > 1e-3


def test_only_the_owner_reads_what_a_party_keeps(tmp_path):
    before = os.umask(0)  # so that nothing but the mode of each file keeps others out
    try:
        party = worker(tmp_path / "parties")
        answer = party.answer(request())
    finally:
        os.umask(before)
    paths = list((tmp_path / "parties").rglob("*"))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}
    assert modes == {"one": 0o700, "client-0": 0o700, "round-0.npz": 0o600, KEY_FILE: 0o600}
    assert stat.S_IMODE((tmp_path / "parties").stat().st_mode) == 0o700
    (file,) = tmp_path.rglob(KEY_FILE)
    key = read_key(file)
    for content in [answer, *(path.read_bytes() for path in paths if path.suffix == ".npz")]:
        assert key not in content and key.hex().encode() not in content


def test_a_damaged_key_is_told(tmp_path):
    sent(worker(tmp_path))
    (file,) = tmp_path.rglob(KEY_FILE)
    file.write_text("abc\n")
    answer = unpack(worker(tmp_path).answer(request()))
    assert answer["refused"] == f"folder: {file} is damaged; it must have 64 hex digits"


def test_gradients_of_a_round_that_comes_again_count_again(tmp_path):
    """Client 0 has five samples: two epochs of three mini-batches, six gradients a round."""
    party = worker(tmp_path)
    counts = [unpack(party.answer(request()))["gradients"] for _ in range(2)]
    assert counts == [6, 12]


def test_gradients_are_not_told_where_the_number_of_samples_is_not(tmp_path):
    """They would tell it: half of it, rounded up, in each of two epochs."""
    party = worker(tmp_path)
    party.sizes = False
    assert "gradients" not in unpack(party.answer(request()))


def test_a_server_that_is_not_told_gradients_does_not_know_epsilon():
    """The message of client 2 is lost here, and its gradients count all the same."""
    written = {}
    clients = Clients(np.array([2]), 0, None)
    store = SimpleNamespace(write=lambda name, ids, rows: written.update({name: float(rows)}))
    remote = Remote(None)
    remote._method = SimpleNamespace(store=store, states=SimpleNamespace(declared={GRADIENTS: 0}))
    remote.loop = SimpleNamespace(participation=SimpleNamespace(parts=lambda one: [(one, False)]))
    for told, expected in ((24.0, 24.0), (None, np.nan)):
        answer = _Answer({}, Log(), told)
        assert remote._group(clients, 0, Log(), answer, None).parcel is None
        np.testing.assert_equal(written[GRADIENTS], expected)
    privacy = SamplePrivacy(**NOISE, delta=1e-5)
    found = privacy.epsilons(np.array(SIZES), np.array([24.0, 8.0, np.nan, 8.0]), 2)
    known = privacy.epsilons(np.array(SIZES)[[0, 1, 3]], np.array([24.0, 8.0, 8.0]), 2)
    np.testing.assert_array_equal(found, [*known[:2], np.nan, known[2]])
    assert np.isnan(privacy.epsilons(np.array([1]), np.array([np.nan]), 2)).all()


def test_a_round_whose_mini_batches_are_all_empty_is_answered(tmp_path):
    """Each of five samples is in the one mini-batch of a round with probability 1/5.

    It is empty with probability (4/5)^5, a third. The message is then noise alone, and the loss, of
    which a party that tells no sizes gives the mean, counts for nothing.
    """
    party = worker(tmp_path, steps={"lr": 0.1, "batch_size": 1, "local_steps": 1})
    party.sizes = False
    counted = set()
    for index in range(40):
        answer = unpack(party.answer(request(round_index=index)))
        assert "refused" not in answer, answer
        (values, counts) = answer["losses"]["train"]
        assert np.isfinite(values).all() and len(values) == 1
        counted.update(counts)
    assert counted == {0, 1}
