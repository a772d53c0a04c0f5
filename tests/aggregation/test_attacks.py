"""Attackers: what they send and train on, who is scored, and that nothing else changes."""

import math
import re

import numpy as np
import pytest
import torch
from scipy import stats

from datamodules import SharedTest
from models import HalfSquaredError
from pfl import ConfigError, FederatedLoop
from pfl.aggregation.attacks import (
    Attackers,
    Backdoor,
    InnerProduct,
    LabelFlip,
    LittleIsEnough,
    RandomMessage,
    Scaling,
    SignFlip,
)
from pfl.aggregation.robust import Median
from pfl.algorithms import FedAvg
from pfl.clients import ClientData, Clients, LocalSchedule
from pfl.randomness import generator
from tests.algorithms.methods import BATCHES, METHODS, SIZES, small_network, small_world
from tests.problems import owned

WEIGHTS = np.array(SIZES) / sum(SIZES)


def trained(fit, rounds=1, attackers=None, **loop):
    algorithm = FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES)
    return fit(algorithm, small_world(), rounds, attackers=attackers, **loop)


@pytest.fixture
def changes(fit):
    """Of one round: w_i - w of each client [4, P], from runs with that client alone."""
    before = small_network()
    start = torch.nn.utils.parameters_to_vector(before.parameters()).detach().numpy()
    alone = [trained(fit, trace=[[client]], evaluate=()).global_model for client in range(4)]
    return np.stack(alone) - start, start


def expected_of(attack, changes, attackers):
    """The changes that arrive, by the definitions of the attacks."""
    rows, honest = changes.copy(), np.delete(changes, attackers, 0)
    for client in attackers:
        if isinstance(attack, SignFlip):
            rows[client] = -attack.scale * changes[client]
        elif isinstance(attack, Scaling):
            rows[client] = attack.factor * changes[client]
        elif isinstance(attack, RandomMessage):
            rng = generator(0, "attack", 0, client)
            rows[client] = attack.deviation * rng.standard_normal(changes.shape[1])
        elif isinstance(attack, InnerProduct):
            rows[client] = -attack.scale * honest.mean(0)
        elif isinstance(attack, LittleIsEnough):
            rows[client] = honest.mean(0) - attack.deviations * honest.std(0)
    return rows


@pytest.mark.parametrize(
    "attack",
    [SignFlip(2.0), Scaling(10.0), RandomMessage(0.3), InnerProduct(0.7), LittleIsEnough(1.5)],
    ids=lambda attack: type(attack).__name__,
)
@pytest.mark.parametrize("chunk", [4, 1])
def test_what_attackers_send(fit, changes, attack, chunk):
    """The mean of the honest changes and of what replaces the others', weighted by samples."""
    rows, start = changes
    attackers = Attackers(clients=[1, 3], attack=attack)
    run = trained(fit, attackers=attackers, clients_at_once=chunk, evaluate=())
    arrived = expected_of(attack, rows, [1, 3])
    np.testing.assert_allclose(run.global_model, start + WEIGHTS @ arrived, rtol=0, atol=1e-13)
    ruled = trained(fit, attackers=attackers, aggregation=Median(), evaluate=())
    median = start + np.median(arrived, 0)
    np.testing.assert_allclose(ruled.global_model, median, rtol=0, atol=1e-13)


def test_the_deviations_that_a_little_takes():
    """n = 50, f = 24 (their Section 3.1): s = 26 - 24 = 2, z = Φ^-1((50 - 24 - 2) / 26) = 1.43."""
    honest = torch.from_numpy(np.random.default_rng(0).normal(size=(26, 5)))
    sent = LittleIsEnough().collude(honest, 24)
    z = (honest.mean(0) - sent) / honest.std(0, correction=0)
    torch.testing.assert_close(z, torch.full_like(z, float(stats.norm.ppf(24 / 26))))
    assert float(z[0]) == pytest.approx(1.43, abs=5e-3)


@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name].pooled])
def test_attackers_that_send_what_they_should_change_nothing(fit, name):
    """For every method, whatever its messages are."""
    method = METHODS[name]

    def run(attack):
        algorithm = method.make(small_network(), **BATCHES)
        attackers = attack and Attackers(clients=[1], attack=attack)
        return fit(algorithm, small_world(classes=method.classes), 2, attackers=attackers)

    class Nothing(Scaling):
        def change(self, message, rng):
            return message

    plain, nothing = run(None), run(Nothing())
    torch.testing.assert_close(
        plain.global_model, nothing.global_model, rtol=0, atol=1e-12, equal_nan=True
    )
    assert nothing.run.loop.participation.attacker_ids.tolist() == [1]


def test_messages_that_the_server_keeps_are_attacked(fit):
    """FedACS's clients send their models first, which then are mixed for others."""
    method = METHODS["FedACS"]
    rows = []
    for attackers in (None, Attackers([1], SignFlip(3.0))):
        algorithm = method.make(small_network(), **BATCHES)
        fit(algorithm, small_world(), 1, evaluate=(), attackers=attackers)
        rows.append(algorithm.kept_rows("w", np.arange(4)))
    expected = rows[0].clone()
    expected[1] *= -3.0
    torch.testing.assert_close(rows[1], expected, rtol=0, atol=1e-15)


# ---- who is scored ------------------------------------------------------------------------------


def test_attackers_are_not_scored(fit):
    honest, attacked = trained(fit), trained(fit, attackers=Attackers([2], Scaling(1.0 + 1e-12)))
    scores = attacked.evaluation.scores["test", "global"]["loss"]
    assert np.isnan(scores).tolist() == [False, False, True, False]
    plain = honest.evaluation.scores["test", "global"]["loss"]
    np.testing.assert_allclose(scores[[0, 1, 3]], plain[[0, 1, 3]], rtol=1e-9)
    assert attacked.row["test/global/loss"] == pytest.approx(plain[[0, 1, 3]].mean())


def test_who_attacks(fit):
    share = trained(fit, attackers=Attackers(0.5, SignFlip())).run.loop.participation
    assert len(share.attacker_ids) == 2 and set(share.attacker_ids) <= set(range(4))
    trace = Attackers([[0], [1, 2]], SignFlip())
    who = trained(fit, 2, attackers=trace).run.loop.participation
    assert who.attacker_ids.tolist() == [0, 1, 2]
    assert who.attacking(0, np.arange(4)).tolist() == [True, False, False, False]
    assert who.attacking(1, np.arange(4)).tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("clients", "line"),
    [
        ([7], "loop.attackers.clients: [7]; it must hold different client ids from 0 to 3"),
        ([0, 1, 2, 3], "loop.attackers.clients: all clients attack; some must be honest"),
        (1.5, "loop.attackers.clients: 1.5; it must be a share of the clients between 0 and 1"),
        ([[0]], "trainer.max_epochs: 2; loop.attackers.clients has only 1 rounds"),
    ],
)
def test_impossible_attackers_are_refused(fit, clients, line):
    with pytest.raises(ConfigError) as error:
        trained(fit, 2, attackers=Attackers(clients, SignFlip()))
    assert str(error.value).startswith(line)


@pytest.mark.parametrize("content", ['{"1": 2}', "null", "[" * 3000, "[0.5]"])
def test_a_file_without_attackers_is_refused_in_one_line(fit, tmp_path, content):
    path = tmp_path / "attackers.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"^loop\.attackers\.clients: [^\n]*attackers\.json"):
        trained(fit, 2, attackers=Attackers(str(path), SignFlip()))


@pytest.mark.parametrize(
    ("attack", "line"),
    [
        (LabelFlip(10), "LabelFlip.classes: 10; the data have 3"),
        (Backdoor(target=99), "Backdoor.target: 99; the data have the classes 0 to 2"),
        (Backdoor(target=3), "Backdoor.target: 3; the data have the classes 0 to 2"),
        (Backdoor(size=5), "Backdoor.size: 5; the images have 4 x 4 pixels"),
        (Backdoor(size=50), "Backdoor.size: 50; the images have 4 x 4 pixels"),
    ],
)
def test_attacks_that_do_not_fit_the_data_are_refused_before_training(attack, line):
    loop = FederatedLoop(images(), attackers=Attackers([1], attack))
    with pytest.raises(ConfigError, match=rf"^loop\.attackers: {re.escape(line)}"):
        loop.setup()


@pytest.mark.parametrize("attack", [LabelFlip(3), Backdoor(target=2, size=4), Backdoor(target=0)])
def test_attacks_that_just_fit_the_data_are_taken(attack):
    attack.check(3, (1, 4, 4))
    attack.check(None, (1, 4, 4))


@pytest.mark.parametrize(
    ("kind", "arguments", "line"),
    [
        (SignFlip, {"scale": 0.0}, "SignFlip.scale: 0.0; it must be positive"),
        (Scaling, {"factor": 1.0}, "Scaling.factor: 1.0; it must be above 1"),
        (RandomMessage, {"deviation": 0.0}, "RandomMessage.deviation: 0.0; it must be positive"),
        (InnerProduct, {"scale": 0.0}, "InnerProduct.scale: 0.0; it must be positive"),
        (LabelFlip, {"classes": 1}, "LabelFlip.classes: 1; it must be a whole number of at least"),
        (Backdoor, {"target": -1}, "Backdoor.target: -1; it must be a whole number of at least 0"),
        (Backdoor, {"size": 0}, "Backdoor.size: 0; it must be a whole number of at least 1"),
        (Backdoor, {"share": 0.0}, "Backdoor.share: 0.0; it must be positive and at most 1"),
        (Backdoor, {"share": 1.1}, "Backdoor.share: 1.1; it must be positive and at most 1"),
        (Backdoor, {"factor": 0.9}, "Backdoor.factor: 0.9; it must be at least 1"),
    ],
)
def test_impossible_arguments_of_attacks_are_refused(kind, arguments, line):
    with pytest.raises(ConfigError) as error:
        kind(**arguments)
    assert str(error.value).startswith(line)


def test_small_arguments_of_attacks_are_taken():
    assert RandomMessage(0.5).deviation == SignFlip(0.5).scale == InnerProduct(0.5).scale == 0.5
    assert Scaling(1.5).factor == 1.5
    assert LabelFlip(2).classes == 2
    assert Backdoor(size=1, share=1.0, factor=1.0).share == 1.0


def test_a_backdoor_sends_its_change_times_a_factor():
    sent = Backdoor(factor=3.0).change(torch.tensor([1.0, -2.0]), np.random.default_rng(0))
    assert sent.tolist() == [3.0, -6.0]


# ---- samples ------------------------------------------------------------------------------------


def images(clients=3, each=6):
    """Small images of three classes in [0, 0.5], tested on as many others."""
    rng = np.random.default_rng(3)
    count = clients * each
    inputs = torch.from_numpy(0.5 * rng.random((2 * count, 1, 4, 4)))
    targets = torch.arange(2 * count) % 3
    return owned(
        np.repeat(np.arange(clients), each),
        inputs[:count],
        targets[:count],
        inputs[count:],
        targets[count:],
        protocol=SharedTest(validation=0.0),
    )


class Poisoned:
    """Client 1 attacks."""

    def __init__(self, attack):
        self.poison = attack.poison

    @staticmethod
    def attacking(round_index, ids):
        return ids == 1


def seen(attack):
    """For each client, the inputs and targets that it trains on, in the order of a round."""
    data = images()
    data.setup()
    clients = Clients(np.arange(3), 0, ClientData(data, poison=attack and Poisoned(attack)))
    batches = list(clients.batches(LocalSchedule(batch_size=4, epochs=2)))
    return [
        [torch.cat([getattr(b, what)[c][: b.counts[c]] for b in batches]) for c in range(3)]
        for what in ("inputs", "targets")
    ]


def test_label_flips_change_the_attackers_labels_alone():
    inputs, targets = seen(None)
    flipped_inputs, flipped = seen(LabelFlip(classes=3))
    for c in range(3):
        assert torch.equal(inputs[c], flipped_inputs[c])
        assert torch.equal(flipped[c], 2 - targets[c] if c == 1 else targets[c])


def test_a_backdoor_marks_a_share_of_the_attackers_samples():
    inputs, targets = seen(None)
    attack = Backdoor(target=2, size=2, value=1.0, share=0.5)
    marked_inputs, marked = seen(attack)
    for c in (0, 2):
        assert torch.equal(inputs[c], marked_inputs[c]) and torch.equal(targets[c], marked[c])
    corner = (marked_inputs[1][:, 0, 2:, 2:] == 1.0).all(dim=(1, 2))
    assert 0 < corner.sum() < len(corner)  # 12 of 6 samples, each twice and alike both times
    assert (marked[1][corner] == 2).all() and torch.equal(marked[1][~corner], targets[1][~corner])
    rest = marked_inputs[1].clone()
    rest[:, 0, 2:, 2:] = inputs[1][:, 0, 2:, 2:]
    assert torch.equal(rest, inputs[1])


class OnlyCorner(torch.nn.Module):
    """Says 2 of images with a bright corner, and 0 of all others."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs):
        bright = (inputs[:, 0, -1, -1] == 1.0).double()
        return torch.stack([1 - bright, 0 * bright, bright], 1) + 0 * self.weight


def test_the_success_of_a_backdoor_is_that_of_other_classes_with_the_corner(fit):
    """The network sees the corner: success is 1, while a third of the real labels are 0."""
    attackers = Attackers([1], Backdoor(target=2, size=2))
    run = fit(FedAvg(OnlyCorner(), lr=0.1), images(), 1, attackers=attackers)
    scores = run.evaluation.scores["test", "global"]
    assert scores["backdoor"][[0, 2]].tolist() == [1.0, 1.0] and math.isnan(scores["backdoor"][1])
    assert run.row["test/global/backdoor"] == 1.0
    assert run.row["test/global/accuracy"] == pytest.approx(1 / 3)
    blind = fit(
        FedAvg(OnlyCorner(), lr=0.1),
        images(),
        1,
        attackers=Attackers([1], Backdoor(target=2, size=2, value=0.9)),
    )
    assert blind.row["test/global/backdoor"] == 0.0  # the network does not see 0.9


def test_targets_that_are_not_classes_cannot_be_flipped(fit):
    with pytest.raises(ConfigError, match=r"^loop\.attackers: LabelFlip"):
        trained(fit, attackers=Attackers([1], LabelFlip()))
