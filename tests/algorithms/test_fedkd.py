"""FedKD against plain PyTorch, its bytes, its limits, and networks of the clients' own."""

import numpy as np
import torch
from torch import nn

from models import MLP, Family
from pfl.algorithms import FML, FedKD
from pfl.method.exported import client_network, global_network
from tests.algorithms.class_world import (
    CLASSES,
    ENGINES,
    FEATURES,
    INPUTS,
    LABELS,
    LOCAL,
    TRACE,
    assert_rounds,
    mean_model,
    network,
    rate,
    samples,
    start,
    world,
)
from tests.refusal import refused

GAMMA, FIRST, LAST = 0.8, 0.6, 0.9
HIDDEN = 2  # features of the messenger


def messenger():
    """Scores A tanh(B x + b) + c with two features, of 19 values."""
    made = MLP(INPUTS, (HIDDEN,), CLASSES).double()
    values = 0.6 * np.random.default_rng(4).normal(size=19)
    nn.utils.vector_to_parameters(torch.from_numpy(values), made.parameters())
    return made


def parted(net):
    """The body and the head of a network of the class world, or of `pfl.models`."""
    if isinstance(net, MLP):
        return net.body, net.head
    return net[:2], net[2]


def first_map(net):
    """W_i in the beginning: ones on the diagonal."""
    rows = parted(net)[1].in_features
    return torch.eye(rows, HIDDEN).double().requires_grad_()


def divergence(p, q):
    """KL(p || q) of each sample."""
    return (p * (p.log() - q.log())).sum(1)


def one_step(own, common, matrix, x, y, lr):
    """All three move by gradients at their old values."""
    entropy = nn.CrossEntropyLoss(reduction="none")
    z, h = parted(own)[0](x), parted(common)[0](x)
    scores, others = parted(own)[1](z), parted(common)[1](h)
    p, q = scores.softmax(1), others.softmax(1)
    loss, other = entropy(scores, y), entropy(others, y)
    weight = GAMMA / (loss + other).detach()
    apart = ((z - h @ matrix.T) ** 2).sum(1) / z.shape[1]
    moves = [
        (loss + weight * (divergence(q.detach(), p) + apart), list(own.parameters())),
        (other + weight * (divergence(p.detach(), q) + apart), list(common.parameters())),
        (weight * apart, [matrix]),
    ]
    slopes = [torch.autograd.grad(f.mean(), at, retain_graph=True) for f, at in moves]
    with torch.no_grad():
        for (_, at), gradients in zip(moves, slopes, strict=True):
            for values, g in zip(at, gradients, strict=True):
                values -= lr * (g + LOCAL["weight_decay"] * values)


def cut(change, energy):
    """A vector of the messenger's values with matrices of low rank; how many values are sent."""
    change = change.clone()
    sent = 0
    begin = 0
    for p in messenger().parameters():
        part = slice(begin, begin + p.numel())
        begin += p.numel()
        if p.dim() == 1:
            sent += p.numel()
            continue
        u, s, v = np.linalg.svd(change[part].view(p.shape).numpy(), full_matrices=False)
        rank = next(r for r in range(len(s) + 1) if (s[:r] ** 2).sum() >= energy * (s**2).sum())
        change[part] = torch.from_numpy((u[:, :rank] * s[:rank]) @ v[:rank]).flatten()
        sent += min(rank * sum(p.shape), p.numel())
    return change, sent


def slow(networks):
    """The messenger, all u_i with W_i, and the bytes that each client has sent, by round."""
    common = messenger()
    maps = [first_map(net) for net in networks]
    up = np.zeros(4)
    history = []
    for t, cohort in enumerate(TRACE):
        before = nn.utils.parameters_to_vector(common.parameters()).detach().clone()
        changes = []
        for i in cohort:
            nn.utils.vector_to_parameters(before.clone(), common.parameters())
            for _ in range(LOCAL["local_steps"]):
                one_step(networks[i], common, maps[i], *samples()[i], rate(t))
            after = nn.utils.parameters_to_vector(common.parameters()).detach()
            change, sent = cut(after - before, FIRST + (LAST - FIRST) * (t + 1) / len(TRACE))
            changes.append(before + change)
            up[i] += 8 * sent
        after = mean_model(cohort, changes, before)
        nn.utils.vector_to_parameters(after.clone(), common.parameters())
        own = [
            torch.cat([*(p.detach().flatten() for p in net.parameters()), w.detach().flatten()])
            for net, w in zip(networks, maps, strict=True)
        ]
        history.append((after.numpy().copy(), own, up.copy()))
    return history


def make(given, **arguments):
    settings = {"distillation": GAMMA, "first_energy": FIRST, "last_energy": LAST}
    return FedKD(given, messenger=messenger(), **settings | LOCAL | arguments)


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    """The bytes, too: messengers down, and up what the singular values leave of their changes."""
    rows = []
    down = np.zeros(4)
    identity = first_map(network()).detach().flatten()
    for (common, own, up), cohort in zip(slow([network() for _ in LABELS]), TRACE, strict=True):
        down[list(cohort)] += 8 * len(common)
        whole = np.concatenate([start(), common, identity])
        rows.append((torch.stack(own).numpy(), whole, down.copy(), up))
    method = make(network(), batch_size=None, engine=engine)
    assert_rounds(watch, method, rows, "head", "w", "down", "up")
    assert (rows[-1][3] < rows[-1][2]).all()  # less is sent than received


def test_networks_of_the_clients_own(watch):
    """Clients 0 and 2 have the wide one, the others the deep one."""

    def networks():
        torch.manual_seed(2)
        return {"wide": MLP(4, (5,), 3).double(), "deep": MLP(4, (3, 2), 3).double()}

    method = make(Family(networks()), batch_size=None)
    watch(method, world(), len(TRACE), trace=TRACE)
    common, expected, _ = slow([networks()[("wide", "deep")[i % 2]] for i in range(4)])[-1]
    for i, row in enumerate(method.client_rows("head", np.arange(4))):
        np.testing.assert_allclose(row[: len(expected[i])], expected[i], rtol=0, atol=1e-12)
        own = nn.utils.parameters_to_vector(client_network(method, i).parameters()).detach()
        np.testing.assert_allclose(own, expected[i][: len(own)], rtol=0, atol=1e-12)
    sent = nn.utils.parameters_to_vector(global_network(method).parameters()).detach()
    np.testing.assert_allclose(sent, common, rtol=0, atol=1e-12)


def test_with_nothing_taught_and_all_sent_it_is_fml_with_nothing_taught(watch):
    settings = LOCAL | {"batch_size": 2, "engine": "sequential", "weight_decay": 0.0}
    whole = {"first_energy": 1.0, "last_energy": 1.0}
    one = FedKD(network(), messenger=messenger(), distillation=0.0, **whole, **settings)
    other = FML(network(), messenger=messenger(), alpha=1.0, beta=1.0, **settings)
    ends = [watch(method, world(), 6, trace=TRACE) for method in (one, other)]
    size = len(start())
    rows = [end["head"][-1][:, :size] for end in ends]
    np.testing.assert_allclose(*rows, rtol=0, atol=1e-13)
    models = [end["w"][-1][: size + 19] for end in ends]
    np.testing.assert_allclose(*models, rtol=0, atol=1e-13)


def test_the_map_of_features_fits_both_networks():
    assert make(network()).network.projection.weight.shape == (FEATURES, HIDDEN)


def test_refusals():
    with refused("model.last_energy: 0.5"):
        make(network(), last_energy=0.5)
    bent = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double()
    with refused("the head of Sequential is a LayerNorm; the method compares features"):
        make(bent)
