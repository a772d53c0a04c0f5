"""Methods of LoRA's factors against exact means, written in NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from models import LoRA
from pfl.aggregation.robust import Median
from pfl.algorithms import FedAvg, FedDPA, FedExLoRA, FedPer, FedSALoRA, FlexLoRA, FLoRA, RoLoRA
from pfl.communication import Message
from tests.algorithms.test_trainable import FULL, SIZES, Linear, world
from tests.problems import History
from tests.refusal import refused

SCALE = 1.5  # alpha / r
SETTINGS = dict(lr=0.2, local_steps=3, **FULL)
EXACT = dict(rtol=0, atol=1e-12)


class Sent(History):
    """`History`, and the models that clients send, by round and client."""

    def on_train_start(self, trainer, pl_module):
        self.sent = []
        update = pl_module.client_update

        def recorded(clients, w):
            message = update(clients, w)
            values = message.values if isinstance(message, Message) else message
            self.sent += [
                (clients.round, client, pl_module.space.split(row.clone()))
                for client, row in zip(clients.ids.tolist(), values, strict=True)
            ]
            return message

        pl_module.client_update = recorded


def trained(fit, kind, rounds=3, trainable=None, callbacks=(), **arguments):
    """A method on three clients of one linear layer W [2, 4], and the layer; 0: as they begin."""
    network = Linear()
    method = kind(network, trainable=trainable or LoRA(2, 2 * SCALE), **SETTINGS | arguments)
    if rounds:
        fit(method, world()[2], rounds, callbacks=list(callbacks))
    return method, network.map


def local_steps(i, weight, a, b, *, move=("a", "b"), lr=0.2, steps=3):
    """A and B after steps of a client on |(W + s B A) x - y|^2 / 2n, in NumPy."""
    x, y = (part.split(SIZES)[i].numpy() for part in world()[:2])
    for _ in range(steps):
        g = (x @ (weight + SCALE * b @ a).T - y).T @ x / len(x)
        step_a, step_b = SCALE * b.T @ g, SCALE * g @ a.T
        a, b = a - lr * step_a * ("a" in move), b - lr * step_b * ("b" in move)
    return a, b


P = np.array(SIZES) / sum(SIZES)


def first(layer):
    """W, A and B of a layer before training, as arrays."""
    return [p.detach().numpy().copy() for p in (layer.base.weight, layer.lora_A, layer.lora_B)]


def test_fedex_lora_moves_the_weight_to_the_exact_mean(fit):
    """Every round against NumPy: A and B are the means, and D what is missing of the mean product;
    the server's weight is sum p_i (W + D + s B_i A_i)."""
    w, a, b = first(trained(fit, FedExLoRA, 0)[1])
    method, layer = trained(fit, FedExLoRA)
    d = np.zeros((2, 4))
    for _ in range(3):
        pairs = [local_steps(i, w + d, a, b) for i in range(3)]
        exact = sum(p * (w + d + SCALE * b_i @ a_i) for p, (a_i, b_i) in zip(P, pairs, strict=True))
        a, b = (sum(p * pair[k] for p, pair in zip(P, pairs, strict=True)) for k in (0, 1))
        d = exact - w - SCALE * b @ a
        assert np.abs(d).max() > 1e-3
    assert method.residual_rank == 3 * 3 * 2  # rounds, clients and the rank of each one's product
    for name, expected in (("lora_A", a), ("lora_B", b), ("residual", d)):
        np.testing.assert_allclose(getattr(layer, name).detach(), expected, **EXACT)
    np.testing.assert_allclose(layer.weight.detach(), exact, **EXACT)


def test_the_gap_of_fedit_is_what_fedex_lora_adds(fit):
    """|mean(BA) - mean(B) mean(A)| / |mean(BA)|, in a row of every method that sends both."""
    w, a, b = first(trained(fit, FedAvg, 0)[1])
    method, _ = trained(fit, FedAvg, 1)
    pairs = [local_steps(i, w, a, b) for i in range(3)]
    exact = sum(p * b_i @ a_i for p, (a_i, b_i) in zip(P, pairs, strict=True))
    means = [sum(p * pair[k] for p, pair in zip(P, pairs, strict=True)) for k in (0, 1)]
    gap = np.linalg.norm(exact - means[1] @ means[0]) / np.linalg.norm(exact)
    assert gap > 0.01
    np.testing.assert_allclose(method.row["train/aggregation_gap"], gap, rtol=1e-10)
    for kind in (FedSALoRA, RoLoRA):  # one factor of each round is not sent
        assert "train/aggregation_gap" not in trained(fit, kind, 1)[0].row


@pytest.mark.parametrize("ranks", [None, [1, 2]], ids=["one rank", "two ranks"])
def test_flora_stacks_the_factors_of_new_adapters(fit, ranks):
    """D grows by s [B_1 B_2 ...] [p_1 A_1; p_2 A_2; ...], here from factors of each client's rank
    that NumPy trains from A_i as they were drawn: B_i = 0 at first, so A_i is found where one step
    leaves it."""
    history = Sent()
    one = trained(fit, FLoRA, 2, ranks=ranks, local_steps=1, callbacks=[history])[0]
    draws = {(t, i): m["map.lora_A"].numpy() for t, i, m in history.sent}
    assert np.abs(draws[0, 0] - draws[1, 0]).max() > 0.1  # drawn anew
    assert not np.array_equal(draws[0, 0][0], draws[0, 1][0])
    assert all(np.abs(a).max() <= 0.5 for a in draws.values())  # 1 / sqrt(4)
    of_client = [2, 2, 2] if ranks is None else [1, 2, 1]
    assert [np.linalg.matrix_rank(draws[0, i]) for i in range(3)] == of_client
    method, layer = trained(fit, FLoRA, 2, ranks=ranks)
    w = layer.base.weight.detach().numpy()
    d = np.zeros((2, 4))
    for t in range(2):
        pairs = [local_steps(i, w + d, draws[t, i], np.zeros((2, 2))) for i in range(3)]
        stacked_b = np.concatenate([b for _, b in pairs], 1)
        stacked_a = np.concatenate([p * a for p, (a, _) in zip(P, pairs, strict=True)])
        d = d + SCALE * stacked_b @ stacked_a
    np.testing.assert_allclose(layer.residual.detach(), d, **EXACT)
    assert not layer.lora_B.any()
    values = sum(r * (4 + 2) for r in of_client)  # A_i and B_i, of 8 bytes, in two rounds
    assert one.progress.bytes_up == method.progress.bytes_up == 2 * 8 * values
    # Nothing in the first round; then D, whose factors would be longer than its 8 values.
    assert method.progress.bytes_down == 3 * 8 * 8


@pytest.mark.parametrize("ranks", [None, [1, 2]], ids=["one rank", "two ranks"])
def test_flex_lora_decomposes_the_mean_product(fit, ranks):
    """Factors are those of NumPy's SVD of sum p_i B_i A_i up to signs; clients train those of their
    rank, and the products of rank 2 in R^(2 x 4) are the mean itself."""
    w, a, b = first(trained(fit, FlexLoRA, 0)[1])
    of_client = [2, 2, 2] if ranks is None else [1, 2, 1]
    for _ in range(3):
        cut = [(a[:r], b[:, :r]) for r in of_client]
        pairs = [local_steps(i, w, *cut[i]) for i in range(3)]
        mean = sum(p * b_i @ a_i for p, (a_i, b_i) in zip(P, pairs, strict=True))
        u, s, v = np.linalg.svd(mean, full_matrices=False)
        a, b = v, u * s
    method, layer = trained(fit, FlexLoRA, ranks=ranks)
    np.testing.assert_allclose(layer.update().detach(), SCALE * mean, **EXACT)
    np.testing.assert_allclose(layer.lora_A.detach().abs(), np.abs(a), rtol=0, atol=1e-10)
    values = sum(r * (4 + 2) for r in of_client)
    assert method.progress.bytes_up == method.progress.bytes_down == 3 * 8 * values


def test_flex_lora_keeps_the_best_product_of_its_rank(fit):
    """With the rank 1 the server has the first singular triple of the mean (Eckart, Young)."""
    trainable = LoRA(1, SCALE)
    history = Sent()
    _, layer = trained(fit, FlexLoRA, 1, trainable=trainable, callbacks=[history])
    products = [m["map.lora_B"] @ m["map.lora_A"] for _, _, m in history.sent]
    order = [i for _, i, _ in history.sent]
    u, s, v = np.linalg.svd(sum(P[i] * m.numpy() for i, m in zip(order, products, strict=True)))
    assert s[1] > 1e-3
    best = SCALE * s[0] * np.outer(u[:, 0], v[0])
    np.testing.assert_allclose(layer.update().detach(), best, **EXACT)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_what_lies_beyond_a_rank_stays_zero(fit, optimizer):
    """The row of A has the gradient B' g, the column of B has g A': each is 0 with the other."""
    make = {
        "sgd": lambda p: torch.optim.SGD(p, weight_decay=0.1),
        "momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p),
    }
    history = Sent()
    trained(fit, FlexLoRA, 2, ranks=[1], optimizer=make[optimizer], callbacks=[history])
    for _, _, model in history.sent:
        assert model["map.lora_A"][0].any()
        assert not model["map.lora_A"][1].any()
        assert not model["map.lora_B"][:, 1].any()


@pytest.mark.parametrize("kind", [FLoRA, FedExLoRA])
def test_fine_tuning_trains_the_factors_and_not_the_dense_update(fit, kind):
    """Three steps of each client from the model after a round, in NumPy: D stays the server's."""
    method = kind(Linear(), trainable=LoRA(2, 2 * SCALE), **SETTINGS)
    fit(method, world()[2], 1, evaluate=("train",), finetune=[3])
    layer = method.network.map
    w, a, b = first(layer)
    weight = w + layer.residual.detach().numpy()
    losses = []
    for i in range(3):
        x, y = (part.split(SIZES)[i].numpy() for part in world()[:2])
        own_a, own_b = local_steps(i, weight, a, b)
        misses = x @ (weight + SCALE * own_b @ own_a).T - y
        losses.append((misses**2).sum() / 2 / len(x))
    assert method.row["train/finetuned/3/loss"] == pytest.approx(np.mean(losses), rel=1e-10)


def test_rolora_trains_one_factor_in_turn(fit):
    """Against NumPy: B with A as it was, then A with the new B; one factor of each is sent."""
    w, a, b = first(trained(fit, RoLoRA, 0)[1])
    for move in ("b", "a", "b"):
        pairs = [local_steps(i, w, a, b, move=move) for i in range(3)]
        a, b = (sum(p * pair[k] for p, pair in zip(P, pairs, strict=True)) for k in (0, 1))
    method, layer = trained(fit, RoLoRA)
    np.testing.assert_allclose(layer.lora_A.detach(), a, **EXACT)
    np.testing.assert_allclose(layer.lora_B.detach(), b, **EXACT)
    assert method.progress.bytes_up == 3 * 8 * (4 + 8 + 4)  # |B| = 4, |A| = 8
    assert method.progress.bytes_down == 3 * 8 * 12 * 3


def test_fedsa_lora_is_fedper_with_b_and_the_head(fit):
    """Bit for bit; a layer without a head shares A alone."""

    def network():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()

    given = dict(trainable=LoRA(2, layers=["0"]), **SETTINGS)
    runs = []
    for kind, extra in ((FedSALoRA, {}), (FedPer, {"personal": ["0.lora_B", "2.*"]})):
        made = kind(network(), **given, **extra)
        runs.append(fit(made, world()[2], 3))
    assert torch.equal(runs[0].global_model, runs[1].global_model)
    for one, other in zip(*(m.client_rows("head", np.arange(3)) for m in runs), strict=True):
        assert torch.equal(one, other)
    assert runs[0].progress.bytes_up == 3 * 3 * 8 * 2 * 4
    alone = trained(fit, FedSALoRA)[0]
    assert alone.client_rows("head", np.arange(3)).shape == (3, 2 * 2)  # B


def test_feddpa_trains_two_adapters_whose_outputs_add(fit):
    """Against NumPy, with s (a B A + (1 - a) B' A'): a client's own pair beside the received one,
    then the received pair without its own; plain means."""
    share, trainable = 0.3, LoRA(2, 2 * SCALE, pair=0.3)
    _, start = trained(fit, FedDPA, 0, trainable=trainable)
    w, a, b = first(start)
    own = {i: (start.own_A.detach().numpy().copy(), np.zeros((2, 2))) for i in range(3)}

    def steps(i, weight, pair, part, count):
        """Local steps of one pair with a share of the output, where `weight` holds the rest."""
        # s share B A is s B A with B scaled; the steps are those of A and share B.
        x, y = (half.split(SIZES)[i].numpy() for half in world()[:2])
        one, two = pair
        for _ in range(count):
            g = (x @ (weight + SCALE * part * two @ one).T - y).T @ x / len(x)
            one, two = (one - 0.2 * SCALE * part * two.T @ g, two - 0.2 * SCALE * part * g @ one.T)
        return one, two

    for _ in range(2):
        shared = SCALE * share * b @ a
        own = {i: steps(i, w + shared, own[i], 1 - share, 2) for i in range(3)}
        pairs = [steps(i, w, (a, b), share, 3) for i in range(3)]
        a, b = (sum(pair[k] for pair in pairs) / 3 for k in (0, 1))
    method, layer = trained(fit, FedDPA, 2, trainable=trainable, personal_epochs=2)
    np.testing.assert_allclose(layer.lora_A.detach(), a, **EXACT)
    np.testing.assert_allclose(layer.lora_B.detach(), b, **EXACT)
    for i, row in enumerate(method.client_rows("head", np.arange(3))):
        expected = np.concatenate([own[i][0].ravel(), own[i][1].ravel()])
        np.testing.assert_allclose(row, expected, **EXACT)
    assert method.progress.bytes_up == 2 * 3 * 8 * (8 + 4)


def test_feddpa_weighs_its_adapters_alike_and_counts_the_epochs_of_both():
    method = FedDPA(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), local_epochs=2, personal_epochs=3
    )
    assert method.network[0].shares == {"lora": 0.5, "own": 0.5}
    assert method.cost(np.array([10, 20])).tolist() == [50, 100]  # 10 (2 + 3)


def test_flex_lora_takes_layers_with_more_outputs_than_inputs():
    """The factors of an update of rank 1 in R^(3 x 2) have that product."""
    method = FlexLoRA(
        nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).double(), trainable=LoRA(1, 1)
    )
    product = torch.tensor([[2.0, 4.0], [1.0, 2.0], [0.0, 0.0]]).double()
    method.products = lambda mean: [product]
    method.server_update({"w": method.global_model.clone()})
    b, a = (method.space.split(method.global_model)[f"0.lora_{name}"] for name in "BA")
    torch.testing.assert_close(b @ a, product)


def test_mistakes_name_the_key(fit):
    with refused("model.trainable: FedExLoRA aggregates LoRA's factors", "lora, without freeze_a"):
        trained(fit, FedExLoRA, 1, trainable=LoRA(2, freeze_a=True))
    for kind in (FedExLoRA, FLoRA, FlexLoRA):
        with refused(f"loop.aggregation: {kind.__name__} needs the mean of the products"):
            fit(kind(Linear(), trainable=LoRA(2), **SETTINGS), world()[2], 1, aggregation=Median())
    with refused("model.ranks: [1, 3]", "ranks from 1 to 2"):
        FLoRA(Linear(), trainable=LoRA(2), ranks=[1, 3])
