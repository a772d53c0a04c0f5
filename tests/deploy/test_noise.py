"""What a party sends is clipped, and has noise of its own that nobody can draw again."""

import numpy as np
import pytest
import torch

from pfl.clients import Clients
from pfl.communication import Message, dense, masked
from pfl.deploy.app import read_node, run_server
from pfl.deploy.noise import OwnNoise
from pfl.deploy.policy import Policy
from pfl.deploy.wire import unpack
from pfl.stages.compression import TopK
from pfl.stages.stage import by_place
from tests.commands import table
from tests.deploy.hospitals import Direct, deployed, party
from tests.refusal import refused

COUNT = 40_000


def client(**received):
    one = Clients(np.array([0]), 0, None)
    one.received = {name: torch.tensor(values) for name, values in received.items()}
    one.personal_messages = frozenset()
    return one


def test_all_messages_together_are_clipped_around_what_the_server_has_sent():
    """The steps (3, 0) of w and (4,) of c have the norm 5, and are scaled by 2 / 5."""
    messages = {
        "w": dense(torch.tensor([[13.0, 20.0]])),
        "c": dense(torch.tensor([[4.0]])),
    }
    sent = OwnNoise(2.0, 0.0).sent(client(w=[10.0, 20.0]), messages)
    torch.testing.assert_close(sent["w"].values, torch.tensor([[10 + 3 * 2 / 5, 20.0]]))
    torch.testing.assert_close(sent["c"].values, torch.tensor([[4 * 2 / 5]]))
    small = OwnNoise(5.5, 0.0).sent(client(w=[10.0, 20.0]), messages)
    assert small["w"].values.tolist() == [[13.0, 20.0]] and small["c"].values.tolist() == [[4.0]]


def test_the_noise_has_the_deviation_that_the_file_says():
    """The clip 2 and the factor 1.5 give 3; the mean of n draws has the deviation 3 / sqrt(n)."""
    reference = torch.full((COUNT,), 7.0, dtype=torch.float64)
    message = Message(reference[None], 1, reference=reference)
    draws = np.random.default_rng(5)
    sent = OwnNoise(2.0, 1.5, lambda: draws).sent(client(), {"x": message})
    noise = sent["x"].values[0] - reference
    assert abs(float(noise.mean())) < 4 * 3 / COUNT**0.5
    # The variance of n normal draws has the relative deviation sqrt(2 / n).
    assert abs(float(noise.var()) / 9 - 1) < 4 * (2 / COUNT) ** 0.5
    expected = torch.from_numpy(3 * np.random.default_rng(5).standard_normal(COUNT))
    torch.testing.assert_close(noise, expected)
    assert sent["x"].nbytes == 8 * COUNT


def test_nobody_can_draw_the_noise_again():
    own = OwnNoise(1.0, 1.0)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        found.append(own.sent(client(), {"x": dense(torch.zeros(1, 9))})["x"].values)
    assert not found[0].equal(found[1])


def test_noise_stays_under_a_mask_and_comes_before_compression():
    mask = torch.tensor([True, False, True])
    message = masked(torch.tensor([[1.0, 2.0, 3.0]]), mask)
    sent = OwnNoise(1.0, 1.0).sent(client(w=[1.0, 2.0, 3.0]), {"w": message})["w"]
    assert sent.values[0, 1] == 0 and (sent.values[0, [0, 2]] != torch.tensor([1.0, 3.0])).all()
    assert sent.nbytes == 2 * 4
    own = OwnNoise(1.0, 1.0)
    assert by_place([TopK(0.5), own])[0] is own


@pytest.mark.parametrize(
    ("name", "values", "line"),
    [
        ("buffers", torch.zeros(1, 2), "running statistics with noise can be impossible"),
        ("counts", torch.zeros(1, 2, dtype=torch.int64), "whole numbers cannot have noise"),
    ],
)
def test_messages_that_cannot_have_noise_are_refused(name, values, line):
    with refused(f"policy.clip: the run sends the message {name!r}: {line}"):
        OwnNoise(1.0, 1.0).sent(client(), {name: dense(values)})


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"noise": 1.0}, "policy.noise: 1.0; its deviation is this many times clip, which is miss"),
        ({"clip": 0}, "policy.clip: 0; it must be a positive number"),
        ({"clip": True}, "policy.clip: True; it must be a positive number"),
        ({"clip": 1, "noise": -0.1}, "policy.noise: -0.1; it must be a number of at least 0"),
        ({"clip": 1, "noise": float("inf")}, "policy.noise: inf; it must be a number"),
    ],
)
def test_clip_and_noise_are_read_strictly(given, line):
    with refused(line):
        Policy.read("policy", given)


def test_rows_leave_with_noise_only_if_the_file_lists_them():
    assert Policy.read("policy", {"clip": 1.0}).tables is None
    assert Policy.read("policy", {"clip": 1.0, "noise": 1.0}).tables == ()
    listed = {"clip": 1.0, "noise": 1.0, "tables": ["x"]}
    assert Policy.read("policy", listed).tables == ("x",)


@pytest.mark.cli
def test_a_party_s_file_clips_whatever_the_server_asks(tmp_path, monkeypatch, capsys):
    """Two of three parties have a clip of 1e-6; their steps leave the model almost as it was.

    With noise 0 party 1 tells its losses, and with 1e-3 party 2 does not.
    """
    monkeypatch.chdir(tmp_path)
    app = deployed(tmp_path)
    policies = [{}, {"clip": 1e-6}, {"clip": 1e-6, "noise": 1e-3}]
    workers = [read_node(party(app, k, {"policy": one}))[0] for k, one in enumerate(policies)]
    answers = []
    channel = Direct(workers)
    ask = channel.ask

    def noted(messages, timeout):
        found = ask(messages, timeout)
        answers.append((messages, found))
        return found

    channel.ask = noted
    run_server(channel, app, {"name": "run", "runs": "runs", "timeout": 60.0, "parties": 3})
    assert "to test; adds noise of its own" in capsys.readouterr().out
    seen = 0
    for messages, found in answers:
        for peer, message in messages.items():
            request = unpack(message)
            if request["do"] != "train":
                continue
            answer = unpack(found[peer])
            step = answer["messages"]["w"][0][0] - request["task"]["received"]["w"]
            norm = float(np.linalg.norm(step))
            seen += 1
            assert (norm < 1.1e-6) == (peer > 0)
            assert ("train" in answer["losses"]) == (peer < 2)
    assert seen == 2 * 3
    assert len(table(tmp_path / "runs/run/metrics.csv")) == 2
