"""Parts of a network, ours or a user's: head, body, patterns and functions."""

import json
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from models import MLP
from pfl.algorithms import FedBABU, FedBN, FedPer, FedRep, LGFedAvg
from pfl.configuration.app import FederatedCLI
from pfl.method import head_name, select_part
from pfl.parameters import ParameterSpace
from tests.algorithms import two_layers
from tests.cli.configurations import SMALL, assert_refused, changed, write
from tests.models.test_models import NETWORKS
from tests.problems import run
from tests.refusal import refused

# Of every class one; variants differ in sizes.
ALL = {name: network for name, network in NETWORKS.items() if "-" not in name}


def chosen(network, part):
    """The names of the parameters in a part."""
    space = ParameterSpace(network)
    mask = select_part(network, space, part, "model.personal")
    assert mask.dtype == torch.bool and mask.shape == (space.size,)
    pieces = {layer.name: mask[layer.span] for layer in space.layers}
    assert all(piece.all() or not piece.any() for piece in pieces.values())
    return {name for name, piece in pieces.items() if piece.any()}


# ---- our networks -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_parts_of_our_networks(name):
    """Their head is the last layer, `head` (test_models.py), and everything else the body."""
    network = ALL[name][0]()
    names = {n for n, _ in network.named_parameters()}
    head = {n for n in names if n.startswith("head.")}
    assert head == {f"head.{n}" for n, _ in network.head.named_parameters()} != set()
    assert head_name(network) == "head"
    assert chosen(network, "head") == head
    assert chosen(network, "body") == names - head
    assert chosen(network, "head.*") == chosen(network, ["head.*"]) == head
    assert chosen(network, ["*weight"]) == {n for n in names if n.endswith("weight")}
    assert chosen(network, lambda n, module: module is network.head) == head
    assert chosen(network, lambda n, module: n.startswith("head.")) == head


# ---- networks of users --------------------------------------------------------------------------


class Named(nn.Module):
    """Modules and parameters by name, in this order."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def tied():
    """Its head uses the weights of the first layer."""
    network = Named(first=nn.Linear(3, 3), middle=nn.Linear(3, 3), last=nn.Linear(3, 3))
    network.last.weight = network.first.weight
    return network


def shared():
    """One layer at the first and at the last place."""
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Linear(3, 3), nn.Tanh(), layer)


def frozen():
    """The last layer never moves."""
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    network[2].requires_grad_(False)
    return network


def frozen_head():
    network = Named(body=nn.Linear(3, 3), head=nn.Linear(3, 2))
    network.head.requires_grad_(False)
    return network


def three():
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


# How it is built, the name of its head, and the parameters of its head.
OWN = {
    "sequence": (three, "2", {"2.weight", "2.bias"}),
    "layers without parameters behind": (
        lambda: nn.Sequential(*three(), nn.Flatten(), nn.LogSoftmax(1)),
        "2",
        {"2.weight", "2.bias"},
    ),
    "nested": (
        lambda: Named(features=three(), classifier=nn.Sequential(nn.ReLU(), three())),
        "classifier.1.2",
        {"classifier.1.2.weight", "classifier.1.2.bias"},
    ),
    "`head` in front": (
        lambda: Named(head=nn.Linear(3, 2), body=nn.Linear(3, 3)),
        "head",
        {"head.weight", "head.bias"},
    ),
    "`head` of several layers": (
        lambda: Named(body=nn.Linear(3, 3), head=three(), scale=nn.Linear(1, 1)),
        "head",
        {"head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias"},
    ),
    "`head` without parameters": (
        lambda: Named(body=three(), head=nn.Identity()),
        "body.2",
        {"body.2.weight", "body.2.bias"},
    ),
    "`head` that is a parameter": (
        lambda: Named(head=nn.Parameter(torch.ones(2)), body=three()),
        "body.2",
        {"body.2.weight", "body.2.bias"},
    ),
    "`head` deeper down": (
        lambda: Named(body=Named(head=nn.Linear(3, 2)), out=nn.Linear(2, 2)),
        "out",
        {"out.weight", "out.bias"},
    ),
    "frozen `head`": (frozen_head, "head", set()),
    "frozen last layer": (frozen, "1", {"1.weight", "1.bias"}),
    "tied weights": (tied, "last", {"first.weight", "last.bias"}),
    "shared layer": (shared, "3", {"0.weight", "0.bias"}),
    "one layer": (lambda: nn.Linear(3, 2), "", {"weight", "bias"}),
    "no bias": (lambda: nn.Sequential(nn.Linear(3, 2, bias=False)), "0", {"0.weight"}),
}


@pytest.mark.parametrize("name", OWN)
def test_the_head_of_a_user_s_network(name):
    build, expected_name, expected = OWN[name]
    network = build()
    names = {n for n, p in network.named_parameters() if p.requires_grad}
    assert head_name(network) == expected_name
    assert chosen(network, "head") == expected
    assert chosen(network, "body") == names - expected


def random_network(rng, depth=0):
    """Layers and sequences of layers, at random, the last one of which may have no parameters."""
    layers = [nn.Linear(2, 2), nn.Tanh(), nn.LayerNorm(2), nn.BatchNorm1d(2)]
    count = rng.randint(1, 4)
    deeper = [depth < 3 and rng.random() < 0.4 for _ in range(count)]
    parts = [random_network(rng, depth + 1) if deep else rng.choice(layers) for deep in deeper]
    return nn.Sequential(nn.Linear(2, 2), *parts)


def leaves(network):
    """The layers in the order in which they run."""
    if not isinstance(network, nn.Sequential):
        return [network]
    return [leaf for part in network for leaf in leaves(part)]


def test_the_head_of_random_networks_is_the_last_layer_that_runs():
    rng = random.Random(0)
    for _ in range(50):
        network = random_network(rng)
        last = [leaf for leaf in leaves(network) if list(leaf.parameters())][-1]
        expected = {
            n for n, p in network.named_parameters() if any(p is q for q in last.parameters())
        }
        assert expected and chosen(network, "head") == expected
        everything = {n for n, _ in network.named_parameters()}
        assert chosen(network, "body") == everything - expected


def test_a_function_gets_the_name_and_the_module_of_each_parameter():
    network, seen = tied(), []

    def first(name, module):
        seen.append((name, module))
        return module is network.first

    assert chosen(network, first) == {"first.weight", "first.bias"}
    assert seen == [
        ("first.weight", network.first),
        ("first.bias", network.first),
        ("middle.weight", network.middle),
        ("middle.bias", network.middle),
        ("last.bias", network.last),  # its weights belong to the first layer, too
    ]


def test_every_form_of_a_part_trains_alike(tmp_path):
    data, w, results = two_layers.problem((4, 3)), two_layers.start(), []
    forms = ["head", "head.*", ["head.weight", "head.bias"], lambda n, m: m.out_features == 2]
    for part in forms:
        method = FedPer(data.network(w), personal=part, lr=0.1, batch_size=None)
        run(method, data, 2, root=tmp_path)
        results.append((method.global_model.clone(), method.client_rows("head", np.arange(2))))
    for one, other in results[1:]:
        assert torch.equal(one, results[0][0]) and torch.equal(other, results[0][1])


# ---- refusals -----------------------------------------------------------------------------------

METHODS = {
    "FedPer": (FedPer, "personal"),
    "FedRep": (FedRep, "personal"),
    "LGFedAvg": (LGFedAvg, "personal"),
    "FedBABU": (FedBABU, "head"),
}
EVERY_METHOD = pytest.mark.parametrize(("kind", "key"), METHODS.values(), ids=METHODS)


@EVERY_METHOD
@pytest.mark.parametrize("part", ["tail.*", "Head", ["head.*", "tail.*"], ["head", "tail"]])
def test_a_pattern_that_matches_nothing_is_refused(kind, key, part):
    pattern = part if isinstance(part, str) else part[-1]
    with refused(f"model.{key}: {pattern!r} matches none of body.linear1.weight", "head.bias"):
        kind(MLP(64, (8,)), **{key: part})


@EVERY_METHOD
def test_a_function_that_chooses_nothing_is_refused(kind, key):
    with refused(f"model.{key}: the function chooses none of what is trained, body.linear1.weight"):
        kind(MLP(64, (8,)), **{key: lambda name, module: False})


@EVERY_METHOD
@pytest.mark.parametrize("part", [[], "*", ["body.*", "head.*"], lambda name, module: True])
def test_no_and_all_parameters_are_refused(kind, key, part):
    with refused(f"model.{key}: ", "it must be some of the parameters, and not all"):
        kind(MLP(64, (8,)), **{key: part})


@EVERY_METHOD
@pytest.mark.parametrize("network", [lambda: nn.Linear(3, 2), frozen_head, partial(MLP, 64, ())])
def test_a_network_without_two_parts_is_refused(kind, key, network):
    with refused(f"model.{key}: ", "it must be some of the parameters, and not all"):
        kind(network())


def test_a_network_without_normalization_is_refused():
    with refused("model.network: MLP", "no normalization layer", "use FedAvg"):
        FedBN(MLP(64, (8,)))
    with refused("model.network: Sequential", "no normalization layer", "buffers: local"):
        FedBN(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)))
    with refused("model.personal: ", "it must be some of the parameters, and not all"):
        FedBN(nn.LayerNorm(3))


def test_no_network_at_all_is_refused():
    for kind in (FedPer, LGFedAvg, FedBABU, FedBN):
        with refused("model.network: 5", "it must be a module"):
            kind(5)


# ---- the command line ---------------------------------------------------------------------------

HEAD, BODY = {"head.weight", "head.bias"}, {"body.linear1.weight", "body.linear1.bias"}
# Method, argument, its value, whether that is in a file or an option, and the chosen parameters.
FORMS = {
    "a word as an option": ("FedPer", "personal", "body", False, BODY),
    "patterns in a file": (
        "FedPer",
        "personal",
        ["head.*", "*.bias"],
        True,
        HEAD | {"body.linear1.bias"},
    ),
    "patterns as an option": (
        "LGFedAvg",
        "personal",
        ["*1.bias", "*.weight"],
        False,
        BODY | {"head.weight"},
    ),
    "a pattern in a file": ("FedBABU", "head", "*.bias", True, {"head.bias", "body.linear1.bias"}),
}


def part_of(method):
    mask = method.head if isinstance(method, FedBABU) else method.personal_part
    return {layer.name for layer in method.space.layers if mask[layer.span].any()}


@pytest.mark.cli
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("form", FORMS)
def test_the_command_line_takes_every_form(monkeypatch, tmp_path, form):
    monkeypatch.setattr(FederatedCLI, "run_subcommand", lambda self, subcommand: None)
    kind, key, value, in_a_file, expected = FORMS[form]
    config, options = changed(SMALL, "model.class_path", kind), []
    if in_a_file:
        config = changed(config, f"model.init_args.{key}", value)
    else:
        options = [f"--model.{key}", value if isinstance(value, str) else json.dumps(value)]
    path = write(tmp_path / "form.yaml", config)
    assert part_of(FederatedCLI(["fit", "--config", str(path), *options]).model) == expected


@pytest.mark.cli
@pytest.mark.usefixtures("here")
def test_the_command_line_names_a_pattern_without_a_match(tmp_path):
    config = changed(SMALL, "model.class_path", "LGFedAvg")
    path = write(tmp_path / "wrong.yaml", changed(config, "model.init_args.personal", ["tail.*"]))
    assert_refused(tmp_path, ["model.personal: 'tail.*'", "head.weight"], "fit", "--config", path)
