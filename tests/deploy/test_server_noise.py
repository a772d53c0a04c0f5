"""The noise of `loop.privacy` where a server goes on from a checkpoint, and repeats a round."""

from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl.aggregation.accountant import Accountant
from pfl.aggregation.privacy import Privacy, PrivateMean, band
from pfl.deploy.wire import unpack
from pfl.randomness import Secret
from tests.algorithms import apart
from tests.deploy.conftest import Ended

CLIP = 0.1
PRIVACY = Privacy(clip=CLIP, noise_multiplier=5.0, delta=1e-3)


def saving(folder):
    return ModelCheckpoint(
        dirpath=folder, filename="last", save_on_train_epoch_end=True, enable_version_counter=False
    )


def received(told, task, round_index):
    """What client 0 got for a task of a round, each time."""
    requests = [request for client, request, _ in told if (client, request["do"]) == (0, task)]
    tasks = [request["task"] for request in requests]
    return [one["received"]["w"] for one in tasks if one["round"] == round_index]


@pytest.mark.parametrize("fault", ["late", None])
def test_two_means_of_one_round_do_not_tell_a_message(federation, tmp_path, monkeypatch, fault):
    """The server ends once all parties got the model of the second round, and does it again.

    If client 1 is late then, four times the difference of the two means is its clipped message,
    unless the two have noises of their own: of deviation 5 * 0.1 * sqrt(2) in each value, while the
    message has a norm of 0.1. If the same parties answer, the second mean is the first one.
    """
    private = partial(apart.FederatedLoop, privacy=PRIVACY)
    monkeypatch.setattr(apart, "FederatedLoop", private)
    parties = federation("FedAvg", faults={(3, "evaluate", 2): "server"})
    with pytest.raises(Ended):
        parties.train(saving(tmp_path / "saved"))
    told = parties.channel.told
    (first,) = received(told, "evaluate", 2)
    (begin,) = received(told, "train", 1)
    (answer,) = [a for c, r, a in told if (c, r["do"]) == (1, "train") and r["task"]["round"] == 1]
    change = unpack(answer)["messages"]["w"][0][0] - begin
    message = change * min(1.0, CLIP / np.linalg.norm(change))

    parties.channel.round = 0
    if fault is not None:
        parties.channel.faults[1, "train", 1] = fault
    with pytest.warns():  # the folder of the run is another one
        parties.train(saving(tmp_path / "saved"), ckpt_path=tmp_path / "saved" / "last.ckpt")
    again = received(told, "evaluate", 2)[1]
    assert received(told, "train", 1)[1].tolist() == begin.tolist()
    if fault is None:
        np.testing.assert_array_equal(again, first)
    else:
        rest = 4 * (first - again) - message
        expected = 5.0 * CLIP * np.sqrt(2 * rest.size)
        assert 0.5 * expected < np.linalg.norm(rest) < 1.5 * expected


def test_noise_of_bands_goes_on_from_a_checkpoint():
    """The noise of the rounds before, of which the checkpoint has the digests, is drawn again.

    With C = (c_0, c_1) of two bands the rows of C X are the rows Z of independent noise.
    """
    privacy = Privacy(clip=1.0, noise_multiplier=1.0, delta=1e-3, bands=2)
    accountant = Accountant(1.0, 1e-3, "all", 1, 2, every=2)
    key = Secret()
    sums = [torch.full((3,), float(index)) for index in range(4)]
    salts = {}
    whole = PrivateMean(privacy, accountant, key, 4)
    whole.salts = salts
    noise = []
    for index, total in enumerate(sums):
        noise.append(whole.release({"w": total.clone()}, {}, index)["w"] - total)
    begun = PrivateMean(privacy, accountant, key, 4)
    begun.salts = {index: salts[index] for index in range(3)}
    last = begun.release({"w": sums[3].clone()}, {}, 3)["w"] - sums[3]
    torch.testing.assert_close(last, noise[3], rtol=0, atol=0)
    own = [key.generator("privacy", index, salts[index]).standard_normal(3) for index in range(4)]
    c = band(2)
    for index in range(1, 4):
        row = c[0] * noise[index] + c[1] * noise[index - 1]
        np.testing.assert_allclose(row.numpy(), own[index], atol=1e-5)
