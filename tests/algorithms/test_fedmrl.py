"""FedMRL against plain PyTorch, its bytes, its limits, and networks of the clients' own."""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from models import MLP, Family
from pfl.algorithms import FedMRL
from pfl.algorithms.distillation.fedmrl import Matryoshka
from pfl.method.exported import client_network, global_network
from tests.algorithms.class_world import (
    CLASSES,
    ENGINES,
    FEATURES,
    INPUTS,
    LABELS,
    LOCAL,
    SIZE,
    TRACE,
    assert_rounds,
    mean_model,
    network,
    rate,
    samples,
    start,
    world,
)
from tests.algorithms.test_fedkd import HIDDEN, messenger, parted
from tests.refusal import refused

FIRST, SECOND = 0.7, 1.4  # weights of the losses of the messenger's and of the own head


def projector(net, seed=0):
    """The layer that a client begins with, where `seed` is that of the run."""
    many = parted(net)[1].in_features
    made = nn.Linear(HIDDEN + many, many).double()
    draw = torch.Generator().manual_seed(seed)
    bound = 1 / np.sqrt(HIDDEN + many)
    with torch.no_grad():
        for values in made.parameters():
            values.uniform_(-bound, bound, generator=draw)
    return made


def one_step(own, common, mixer, x, y, lr):
    """All three move by the gradient at their old values."""
    h, z = parted(common)[0](x), parted(own)[0](x)
    nested = mixer(torch.cat([h, z], 1))
    small = cross_entropy(parted(common)[1](nested[:, :HIDDEN]), y)
    large = cross_entropy(parted(own)[1](nested), y)
    everything = [p for part in (own, common, mixer) for p in part.parameters()]
    slopes = torch.autograd.grad(FIRST * small + SECOND * large, everything)
    with torch.no_grad():
        for values, g in zip(everything, slopes, strict=True):
            values -= lr * (g + LOCAL["weight_decay"] * values)


def vector(*modules):
    values = [p.detach().flatten() for module in modules for p in module.parameters()]
    return torch.cat(values)


def slow(networks, mixers):
    """The messenger, and all u_i with P_i, by round."""
    common = messenger()
    history = []
    for t, cohort in enumerate(TRACE):
        before = vector(common)
        sent = []
        for i in cohort:
            nn.utils.vector_to_parameters(before.clone(), common.parameters())
            for _ in range(LOCAL["local_steps"]):
                one_step(networks[i], common, mixers[i], *samples()[i], rate(t))
            sent.append(vector(common))
        after = mean_model(cohort, sent, before)
        nn.utils.vector_to_parameters(after.clone(), common.parameters())
        own = [vector(net, mixer) for net, mixer in zip(networks, mixers, strict=True)]
        history.append((after.numpy().copy(), own))
    return history


def make(given, **arguments):
    torch.manual_seed(0)
    settings = {"messenger_weight": FIRST, "own_weight": SECOND, "batch_size": None}
    return FedMRL(given, messenger=messenger(), **settings | LOCAL | arguments)


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    """The bytes, too: the 19 values of a messenger down and up."""
    networks = [network() for _ in LABELS]
    first = vector(projector(network()))
    sent = np.zeros(4)
    rows = []
    for (common, own), cohort in zip(
        slow(networks, [projector(net) for net in networks]), TRACE, strict=True
    ):
        sent[list(cohort)] += 8 * 19
        whole = np.concatenate([start(), common, first])
        rows.append((torch.stack(own).numpy(), whole, sent.copy(), sent.copy()))
    assert_rounds(watch, make(network(), engine=engine), rows, "head", "w", "down", "up")


def families():
    """Two networks of other widths and depths."""
    torch.manual_seed(2)
    return {"wide": MLP(4, (5,), 3).double(), "deep": MLP(4, (3, 2), 3).double()}


def test_networks_of_the_clients_own(watch):
    """Clients 0 and 2 have the wide one, the others the deep one; what is exported predicts."""
    method = make(Family(families()))
    watch(method, world(), len(TRACE), trace=TRACE)
    networks = [families()[("wide", "deep")[i % 2]] for i in range(4)]
    mixers = [projector(net) for net in networks]
    common, expected = slow(networks, mixers)[-1]
    shared = global_network(method)
    np.testing.assert_allclose(vector(shared), common, rtol=0, atol=1e-12)
    x = samples()[0][0]
    for i, row in enumerate(method.client_rows("head", np.arange(4))):
        np.testing.assert_allclose(row[: len(expected[i])], expected[i], rtol=0, atol=1e-12)
        assert not row[len(expected[i]) :].any()
        exported = client_network(method, i)
        assert isinstance(exported, Matryoshka)
        both = torch.cat([shared.body(x), networks[i].body(x)], 1)
        scores = networks[i].head(mixers[i](both))
        torch.testing.assert_close(exported(x), scores, rtol=0, atol=1e-12)


def test_where_only_the_own_head_learns_the_messengers_head_stays(watch):
    method = make(network(), messenger_weight=0.0, weight_decay=0.0)
    watch(method, world(), len(TRACE), trace=TRACE)
    shared = global_network(method)
    np.testing.assert_allclose(vector(shared.head), vector(messenger().head), rtol=0, atol=1e-14)
    assert (vector(shared.body) - vector(messenger().body)).abs().max() > 0.01


def test_the_projector_is_drawn_from_the_seed_and_moves_no_other_draw():
    own, common = network(), messenger()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    values = [vector(Matryoshka(own, common).projection) for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(*values)
    assert torch.equal(values[0], vector(projector(network(), seed=5)))
    torch.manual_seed(6)
    assert not torch.equal(values[0], vector(Matryoshka(network(), messenger()).projection))


def test_a_prediction_counts_both_networks_and_the_projector():
    """SIZE of the own network, 19 of the messenger, 3 * 5 + 3 of the projector."""
    counted = make(network()).parameters_personalized(range(2), None)
    assert counted.tolist() == [SIZE + 19 + FEATURES * (HIDDEN + FEATURES) + FEATURES] * 2


def test_refusals(fit):
    wide = MLP(INPUTS, (FEATURES + 1,), CLASSES).double()
    with refused("model.messenger: the head of MLP gets 4 features, and that of Sequential 3;"):
        FedMRL(network(), messenger=wide)
    bent = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double()
    with refused("the head of Sequential is a LayerNorm; the method compares features"):
        FedMRL(bent)
    after = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)).double()
    with refused("the output of Sequential is not that of its last layer '0'"):
        fit(FedMRL(after), world(), 1)
