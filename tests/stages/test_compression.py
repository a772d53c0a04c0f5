"""What compressors send, against closed forms: expectations, variances, contractions, bytes."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pfl.communication import Message
from pfl.context import RunContext
from pfl.parameters import ParameterSpace
from pfl.randomness import generator
from pfl.stages.compression import QSGD, PowerSGD, RandomK, SignEF, TopK
from pfl.stages.compressor import Known, pack, unpack
from pfl.stages.stage import Served
from tests.refusal import refused

X = torch.from_numpy(np.random.default_rng(3).normal(size=64))


def squared(x):
    return float(x @ x)


def decoded(stage, x, known=None):
    known = known or Known(len(x))
    return stage.decode(stage.encode(x, known), known)


@dataclass(frozen=True)
class Given(Known):
    """Draws that a test gives, in place of a generator's."""

    drawn: Any = None

    def draws(self):
        return self

    def choice(self, size, count, replace):
        assert (size, len(self.drawn), replace) == (self.size, count, False)
        return np.array(self.drawn)

    def random(self, size):
        return np.full(size, self.drawn)


# ---- unbiased -----------------------------------------------------------------------------------


def test_random_k_is_unbiased_and_has_its_variance_over_all_subsets():
    """Over the 15 pairs of 6 places: the mean is x, and the mean square error (d/k - 1) |x|^2."""
    x = X[:6]
    pairs = list(itertools.combinations(range(6), 2))
    values = torch.stack([decoded(RandomK(1 / 3), x, Given(6, drawn=pair)) for pair in pairs])
    torch.testing.assert_close(values.mean(0), x)
    error = float((values - x).square().sum(1).mean())
    assert error == pytest.approx((6 / 2 - 1) * squared(x))


def test_random_k_draws_all_places_alike():
    """Of 4,000 clients each place has Binomial(4000, 1/4): within 5 deviations of 1,000."""
    x = torch.ones(8)
    drawn = torch.stack([decoded(RandomK(0.25), x, Known(8, client=c)) for c in range(4000)])
    counts = drawn.count_nonzero(0)
    assert (drawn.count_nonzero(1) == 2).all()
    assert (counts - 1000).abs().max() < 5 * math.sqrt(4000 * 0.25 * 0.75)


@pytest.mark.parametrize("levels", [1, 2, 5, 16])
def test_qsgd_is_unbiased_and_has_its_variance(levels):
    """Over 2,048 draws that lie evenly in [0, 1), each probability is met to 1/2048.

    A value has the variance (|x| / s)^2 f (1 - f) with f = a - floor(a), a = s |x_j| / |x|.
    """
    count = 2048
    draws = (np.arange(count) + 0.5) / count
    values = torch.stack([decoded(QSGD(levels), X, Given(64, drawn=u)) for u in draws])
    step = float(X.norm()) / levels
    assert (values.mean(0) - X).abs().max() <= step / count
    share = X.abs() / step
    share = share - share.floor()
    variances = step**2 * share * (1 - share)
    errors = (values - X).square().mean(0)
    torch.testing.assert_close(errors, variances, rtol=0, atol=step**2 / count)
    bound = min(64 / levels**2, 8 / levels) * squared(X)  # Lemma 3.1 with d = 64
    assert float(errors.sum()) <= bound


def test_qsgd_draws_for_each_value_and_client():
    """The mean over 4,000 clients is within 6 deviations, |x| / (2 s) at most, of the update."""
    values = torch.stack([decoded(QSGD(2), X, Known(64, client=c)) for c in range(4000)])
    deviation = float(X.norm()) / 4 / math.sqrt(4000)
    assert (values.mean(0) - X).abs().max() < 6 * deviation


def test_qsgd_has_the_values_of_its_levels():
    x = torch.tensor([3.0, -4.0, 0.0])  # the norm is 5: with s = 5 nothing is left to chance
    assert decoded(QSGD(5), x).tolist() == pytest.approx([3, -4, 0])
    assert decoded(QSGD(5), torch.zeros(3)).tolist() == [0, 0, 0]


# ---- contractions -------------------------------------------------------------------------------


@pytest.mark.parametrize("share, count", [(0.25, 16), (0.5, 32), (0.001, 1)])
def test_top_k_contracts(share, count):
    sent = decoded(TopK(share), X)
    assert sent.count_nonzero() == count
    largest = X.abs().sort(descending=True).values[:count]
    assert sent.abs().sort(descending=True).values[:count].equal(largest)
    assert squared(sent - X) <= (1 - count / 64) * squared(X)
    equal = torch.ones(64)  # the bound is met where all values have one size
    assert squared(decoded(TopK(share), equal) - equal) == 64 - count


def test_signs_contract_by_the_norms():
    sent = decoded(SignEF(), X)
    assert sent.sign().equal(X.sign())
    share = float(X.abs().sum()) ** 2 / (64 * squared(X))
    assert squared(sent - X) == pytest.approx((1 - share) * squared(X))
    zeros = torch.tensor([0.0, 2.0])  # 0 counts as positive, which the equality allows
    assert decoded(SignEF(), zeros).tolist() == [1, 1]


def power_sgd(rank, network):
    stage = PowerSGD(rank)
    space = ParameterSpace(network)
    stage.set_up(served(space.size, space.layers))
    return stage, space


def test_power_sgd_projects():
    """P P' M is nearer than 0, exact for a matrix of rank r, and in repetition the best of rank r.

    The squared distance of the best is the sum of the other squared singular values.
    """
    stage, space = power_sgd(2, nn.Linear(9, 7).double())
    known = Known(space.size)
    m = torch.from_numpy(np.random.default_rng(0).normal(size=(7, 9)))
    singular = torch.linalg.svdvals(m)
    bias = torch.arange(7.0).double()
    x = torch.cat([m.flatten(), bias])
    parts = stage.encode(x, known)
    assert [len(parts[name]) for name in ("left", "right", "rest")] == [14, 18, 7]
    sent = stage.decode(parts, known)
    assert sent[63:].equal(bias)
    best = float(singular[2:].square().sum())
    error = squared(sent - x)
    assert best < error < squared(m.flatten())
    for _ in range(300):
        parts = stage.encode(x, known, parts["right"])
    assert squared(stage.decode(parts, known) - x) == pytest.approx(best)

    u, s, v = torch.linalg.svd(m, full_matrices=False)
    low = torch.cat([((u[:, :2] * s[:2]) @ v[:2]).flatten(), bias])
    torch.testing.assert_close(stage.decode(stage.encode(low, known), known), low)


def test_power_sgd_sends_layers_whose_factors_are_not_smaller():
    """Of a kernel 4 x 3 x 2 x 2, an 8 x 6 matrix, 14 values for rank 1, and a 1 x 4 layer."""
    network = nn.Sequential(nn.Conv2d(3, 4, 2, bias=False), nn.Linear(4, 1)).double()
    stage, space = power_sgd(1, network)
    known = Known(space.size)
    x = torch.from_numpy(np.random.default_rng(1).normal(size=space.size))
    parts = stage.encode(x, known)
    assert {name: len(part) for name, part in parts.items()} == {"left": 8, "right": 6, "rest": 5}
    kernel = torch.einsum("o,i->oi", *(torch.arange(1.0, n + 1).double() for n in (8, 6)))
    x[space.layers[0].span] = space.layers[0].from_matrix(kernel)
    torch.testing.assert_close(decoded(stage, x, known), x)
    # Where the kernel does not travel its layer is no matrix of the update.
    mask = torch.arange(space.size) >= 48
    assert decoded(stage, x[mask], Known(5, mask=mask)).equal(x[mask])


def test_power_sgd_has_factors_of_each_matrix():
    """Updates of rank 2 of two layers, 5 x 9 and 7 x 6, between their biases, are exact."""
    network = nn.Sequential(nn.Linear(9, 5), nn.Linear(6, 7)).double()
    stage, space = power_sgd(2, network)
    rng = np.random.default_rng(8)
    pieces = []
    for rows, columns in ((5, 9), (7, 6)):
        pieces.append((rng.normal(size=(rows, 2)) @ rng.normal(size=(2, columns))).ravel())
        pieces.append(rng.normal(size=rows))
    x = torch.from_numpy(np.concatenate(pieces))
    parts = stage.encode(x, Known(space.size))
    assert {name: len(part) for name, part in parts.items()} == {
        "left": 2 * (5 + 7),
        "right": 2 * (9 + 6),
        "rest": 5 + 7,
    }
    torch.testing.assert_close(stage.decode(parts, Known(space.size)), x)


def test_power_sgd_begins_where_the_client_ended():
    """The second payload of an equal update comes from the first one's R, and the server reads it
    from the payload alone; the rest of the state, as long as a model, stays zero."""
    stage, _ = power_sgd(1, nn.Linear(9, 7).double())
    clients = Group(stage, torch.zeros(70).double())
    update = torch.from_numpy(np.random.default_rng(2).normal(size=(2, 70)))
    m = update[:, :63].view(2, 7, 9)
    right = None
    for index in range(3):
        clients.round = index
        clients.state["PowerSGD memory of w"].zero_()
        payload = stage.sent(clients, {"w": Message(update.clone(), 560)})["w"].payload
        if right is not None:
            basis = torch.nn.functional.normalize(m @ right[:, :, None], dim=1)
            torch.testing.assert_close(payload["left"].abs(), basis[:, :, 0].abs())
        right = payload["right"]
        state = clients.state[stage.start("w")]
        assert state[:, :9].equal(right)
        assert not state[:, 9:].any()


# ---- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 3, 8, 13])
def test_bits_are_unpacked_as_they_were_packed(bits):
    numbers = torch.from_numpy(np.random.default_rng(bits).integers(0, 2**bits, 21))
    packed = pack(numbers, bits)
    assert len(packed) == math.ceil(21 * bits / 8)
    assert unpack(packed, 21, bits).equal(numbers)


# ---- messages of clients ------------------------------------------------------------------------


def served(size, layers=()):
    context = RunContext(0, np.arange(3), np.ones(3), None, torch.device("cpu"))
    return Served("Method", context, size, cohort_size=3, layers=layers)


class Group:
    """Two clients in a round, and what they have received."""

    def __init__(self, stage, w):
        self.ids = np.array([2, 0])
        self.round = 0
        self.received = {"w": w}
        self.state = {name: torch.zeros(2, w.shape[-1]).double() for name in stage.states()}

    def __len__(self):
        return len(self.ids)


STAGES = {
    "TopK": TopK(0.1),
    "RandomK": RandomK(0.1),
    "QSGD": QSGD(3),
    "SignEF": SignEF(),
    "PowerSGD": PowerSGD(1),
}
# Bytes of 70 float64 values in float64: 7 values and 7 places of 7 bits; 7 values; the norm and 70
# codes of 2 + 1 bits; the mean size and 70 bits; 7 + 9 values of factors and 7 of the bias.
NBYTES = {"TopK": 56 + 7, "RandomK": 56, "QSGD": 8 + 27, "SignEF": 8 + 9, "PowerSGD": 8 * 23}


@pytest.mark.parametrize("own", [False, True], ids=["common", "own rows"])
@pytest.mark.parametrize("name", STAGES)
def test_what_is_sent_and_remembered_adds_up_to_what_was_meant(name, own):
    """Over five rounds; without a memory each update is compressed by itself."""
    stage = STAGES[name]
    space = ParameterSpace(nn.Linear(9, 7).double())
    stage.set_up(served(space.size, space.layers))
    rng = np.random.default_rng(5)
    w = torch.from_numpy(rng.normal(size=(2, 70) if own else 70))
    clients = Group(stage, w)
    meant = torch.zeros(2, 70).double()
    sent = torch.zeros(2, 70).double()
    for index in range(5):
        clients.round = index
        update = torch.from_numpy(rng.normal(size=(2, 70)))
        message = stage.sent(clients, {"w": Message(w + update, 560)})["w"]
        assert message.nbytes == NBYTES[name]
        assert sum(part[0].nbytes for part in message.payload.values()) == NBYTES[name]
        # The server has the payload and what it sent, and nothing else.
        empty = Message(message.values[:0], 0, payload=message.payload)
        read = stage.arrived(clients, {"w": empty})["w"]
        assert read.values.equal(message.values)
        meant += update
        sent += message.values - w
    if stage.error_feedback:
        memory = clients.state[stage.memory("w")]
        torch.testing.assert_close(sent + memory, meant)
        assert memory.abs().max() > 0.1
    else:
        assert clients.state == {}


def test_only_values_under_a_mask_are_compressed():
    """The mask is known to both: places count among 40 of 70 values, 4 of them with 6 bits each."""
    stage = TopK(0.1)
    stage.set_up(served(70))
    mask = torch.arange(70) < 40
    w = torch.linspace(1, 2, 70).double()
    clients = Group(stage, w)
    values = torch.where(mask, w + X.repeat(2)[:70], 0.0).expand(2, -1)
    message = stage.sent(clients, {"w": Message(values, 320, mask=mask)})["w"]
    assert message.nbytes == 4 * 8 + 3
    assert (message.values[:, 40:] == 0).all()
    assert ((message.values - w)[:, :40].abs() > 1e-12).sum(1).tolist() == [4, 4]
    assert (clients.state[stage.memory("w")][:, 40:] == 0).all()


def test_references_are_the_declared_or_the_received_or_zero():
    stage = TopK(0.1, messages=["w", "c"])
    stage.set_up(served(64))
    clients = Group(stage, 10 * torch.ones(64).double())
    x = X.expand(2, -1)
    reference = torch.full((64,), 7.0).double()
    sent = {"w": Message(x + 7, 512, reference=reference), "c": Message(x, 512)}
    sent = stage.sent(clients, sent)
    best = decoded(TopK(0.1), X)
    torch.testing.assert_close(sent["w"].values - 7, best.expand(2, -1))
    assert sent["c"].values.equal(best.expand(2, -1))


def test_a_payload_of_no_client_has_its_parts_and_lengths():
    for name, stage in STAGES.items():
        space = ParameterSpace(nn.Linear(9, 7).double())
        stage.set_up(served(space.size, space.layers))
        clients = Group(stage, torch.zeros(70).double())
        full = stage.sent(clients, {"w": Message(torch.ones(2, 70).double(), 560)})["w"]
        clients.ids = clients.ids[:0]
        clients.state = {key: rows[:0] for key, rows in clients.state.items()}
        empty = stage.sent(clients, {"w": Message(torch.ones(0, 70).double(), 560)})["w"]
        assert empty.nbytes == full.nbytes
        for part, values in full.payload.items():
            assert empty.payload[part].shape == (0, *values.shape[1:]), name


def test_client_and_server_draw_the_same():
    given = Known(4, seed=3, purpose="RandomK of w", round=2, client=7)
    assert given.draws().random() == generator(3, "RandomK of w", 2, 7).random()
    assert Known(4).draws().random() == generator(0, "compression", 0, 0).random()


def test_messages_without_bytes_stay_as_they_are():
    """Both in a round in which nothing travels, and zeros beside a message that does."""
    stage = TopK(0.1)
    stage.set_up(served(64))
    clients = Group(stage, torch.zeros(64).double())
    x = X.expand(2, -1)
    free = {"w": Message(x, 0), "c": Message(0 * x, 0)}
    sent = stage.sent(clients, free)
    assert sent["w"] is free["w"] and sent["c"] is free["c"]
    zeros = {"w": Message(x, 512), "c": Message(0 * x, 0)}
    sent = stage.sent(clients, zeros)
    assert sent["w"].nbytes < 512 and sent["c"] is zeros["c"]
    with refused("loop.stages: TopK: the message 'c' of Method has no bytes"):
        stage.sent(clients, {"w": Message(x, 512), "c": Message(x, 0)})


def test_messages_that_cannot_be_compressed_are_refused():
    stage = TopK(0.1, ["w"])
    stage.set_up(served(63))
    clients = Group(stage, torch.zeros(64).double())
    x = X.expand(2, -1)
    assert stage.sent(clients, {}) == {}
    with refused("TopK.messages: w; the clients of Method send a, b; give some of these"):
        stage.sent(clients, {"a": Message(x, 512), "b": Message(x, 512)})
    with refused("the server of Method reads the message 'w' of every client by itself"):
        stage.sent(clients, {"w": Message(x, 512, reduce="rows")})
    with refused("TopK.messages: w of Method has 64 values, and the memory", "the model, 63"):
        stage.sent(clients, {"w": Message(x, 512)})
    free = RandomK(0.1)  # it has no memory
    free.set_up(served(63))
    assert free.sent(clients, {"w": Message(x, 512)})["w"].nbytes == 6 * 8


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: TopK(0.0), "loop.stages: TopK.share: 0.0; it must be positive and at most 1"),
        (lambda: RandomK(1.5), "loop.stages: RandomK.share: 1.5"),
        (lambda: QSGD(0), "loop.stages: QSGD.levels: 0; it must be a whole number from 1 to 32767"),
        (lambda: QSGD(2**15), "loop.stages: QSGD.levels: 32768; it must be a whole number from 1"),
        (lambda: TopK(1.5), "loop.stages: TopK.share: 1.5; it must be positive and at most 1"),
        (lambda: RandomK(0.0), "loop.stages: RandomK.share: 0.0; it must be positive"),
        (lambda: TopK(0.1, []), "loop.stages: TopK.messages: []; it must be a list of names"),
        (
            lambda: TopK(0.1, ["w", "w"]),
            "loop.stages: TopK.messages: ['w', 'w']; it must be a list",
        ),
        (lambda: PowerSGD(0), "loop.stages: PowerSGD.rank: 0; it must be a whole number of at"),
        (lambda: SignEF("w"), "loop.stages: SignEF.messages: 'w'; it must be a list of names"),
    ],
)
def test_an_impossible_argument_is_refused(make, words):
    with refused(words):
        make()


def test_arguments_at_their_limits_are_taken():
    assert QSGD(2**15 - 1).levels == 32767 and QSGD(1).levels == 1
    assert TopK(1.0).share == RandomK(1.0).share == 1.0
    assert PowerSGD(1).rank == 1
    assert TopK(0.5, ("a", "b")).messages == ["a", "b"]


@pytest.mark.parametrize("levels", [1, 3, 4, 1000])
def test_more_than_the_highest_level_is_refused(levels):
    """s levels are numbers of ceil(log2(s + 1)) bits, which can say more than s."""
    stage = QSGD(levels)
    bits = math.ceil(math.log2(levels + 1)) + 1
    known = Known(2)
    norm = torch.ones(1)
    exact = stage.decode({"norm": norm, "codes": pack(torch.tensor([2 * levels, 1]), bits)}, known)
    assert exact.tolist() == [1, 0]
    if levels + 1 < 2 ** (bits - 1):
        codes = pack(torch.tensor([2 * (levels + 1), 0]), bits)
        with pytest.raises(ValueError, match=f"level {levels + 1} of {levels}"):
            stage.decode({"norm": norm, "codes": codes}, known)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (TopK(0.5), "TopK(share=0.5)"),
        (QSGD(4, ["w", "c"]), "QSGD(messages=['w', 'c'], levels=4)"),
        (SignEF(), "SignEF()"),
    ],
)
def test_a_compressor_is_described_by_its_arguments(stage, words):
    stage.set_up(served(8))
    assert stage.describe() == words
