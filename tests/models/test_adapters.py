"""Adapters against their formulas, each model of a batch on its own, and what they refuse."""

import re

import pytest
import torch
from torch import nn
from torch.func import functional_call

from models import MLP, Bottleneck, Delta, LoRA, SmallCNN, SoftPrompt, Trainable
from models.adapters import DeltaLayer, LoRALayer, adapted_layers, block_names, merged, train_only

EXACT = dict(rtol=0, atol=1e-12)


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is [in, out]."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs)),
            nn.Parameter(torch.randn(outputs)),
        )

    def forward(self, x):
        return x @ self.weight + self.bias


def layers():
    """Three layers and a head, with adapters that are drawn at random, in float64."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 4), nn.Tanh(), Conv1D(4, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 2)
    ).double()


KINDS = {
    "lora": LoRA(rank=2, alpha=3.0),
    "pair": LoRA(rank=2, alpha=3.0, pair=0.3),
    "delta": Delta(),
    "bottleneck": Bottleneck(size=3),
}


def drawn(kind):
    network = layers()
    train_only(network, KINDS[kind])
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter)
    return network


def formula(kind, layer, x):
    """The output of an adapted layer, written from its definition."""
    weight = layer.base.weight.mT if isinstance(layer.base, Conv1D) else layer.base.weight
    y = x @ weight.T + layer.base.bias
    p = dict(layer.named_parameters(recurse=False))
    if kind == "bottleneck":
        return y + torch.clamp(y @ p["down"].T, min=0) @ p["up"].T
    if kind == "delta":
        return y + x @ (p["delta"] if layer.base.weight is weight else p["delta"].T).T
    shares = {"lora": 1.0} if kind == "lora" else {"lora": 0.3, "own": 0.7}
    change = sum(a * 3.0 / 2 * p[f"{n}_B"] @ p[f"{n}_A"] for n, a in shares.items())
    return y + x @ change.T


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapted_layer_is_its_formula(kind):
    network = drawn(kind)
    adapted = adapted_layers(network)
    assert list(adapted) == ["0", "2", "4"]  # not the head
    for layer in adapted.values():
        x = torch.randn(3, 7, layer.in_features, dtype=torch.float64)
        torch.testing.assert_close(layer(x), formula(kind, layer, x), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_begins_as_it_was(kind):
    """B, D and U are zero: only what is trained differs from the network without adapters."""
    x = torch.randn(3, 5, dtype=torch.float64)
    before = layers()(x)
    network = layers()
    train_only(network, KINDS[kind])
    torch.testing.assert_close(network(x), before, **EXACT)
    frozen = {id(p) for p in layers().parameters()}
    assert len(frozen) == 10
    own = [name for name, p in network.named_parameters() if not p.requires_grad]
    assert len(own) == 8  # all but the head's two


@pytest.mark.parametrize("kind", KINDS)
def test_several_models_at_once_are_each_alone(kind):
    """The rows of a batch belong to C models in turn; outputs and gradients are those alone."""
    layer = adapted_layers(drawn(kind))["0"]
    names = [n for n, p in layer.named_parameters() if p.requires_grad]
    shapes = {n: layer.get_parameter(n).shape for n in names}
    many = {
        n: torch.randn(3, *s, dtype=torch.float64, requires_grad=True) for n, s in shapes.items()
    }
    x, weights = torch.randn(2, 6, 7, 5, dtype=torch.float64)[0], torch.randn(6, 7, 4).double()
    y = functional_call(layer, many, (x,))
    gradients = torch.autograd.grad((y * weights).sum(), list(many.values()))
    for c in range(3):
        rows = slice(2 * c, 2 * c + 2)
        one = {n: p[c].detach().requires_grad_() for n, p in many.items()}
        alone = functional_call(layer, one, (x[rows],))
        torch.testing.assert_close(y[rows], alone, **EXACT)
        expected = torch.autograd.grad((alone * weights[rows]).sum(), list(one.values()))
        for g, e in zip(gradients, expected, strict=True):
            torch.testing.assert_close(g[c], e, **EXACT)


@pytest.mark.parametrize("kind", ["lora", "pair", "delta"])
def test_a_merged_network_has_its_own_layers_and_the_same_outputs(kind):
    network, x = drawn(kind), torch.randn(3, 5, dtype=torch.float64)
    plain = merged(network)
    assert plain.state_dict().keys() == layers().state_dict().keys()
    torch.testing.assert_close(plain(x), network(x), **EXACT)
    with pytest.raises(ValueError, match="cannot be merged"):
        merged(drawn("bottleneck"))


class Twice(nn.Module):
    """Two linear layers that are one, or that have one weight."""

    def __init__(self, is_one):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        if not is_one:
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.second(self.first(x)))


@pytest.mark.parametrize("is_one", [True, False])
@pytest.mark.parametrize("what", [LoRA(rank=2, layers=["first"]), Delta(["first"])])
def test_a_weight_that_another_layer_has_is_not_merged(what, is_one):
    """As of a language model, whose last layer has the weights of its first."""
    network = Twice(is_one)
    train_only(network, what)
    with pytest.raises(ValueError, match="another layer has the weight of first"):
        merged(network)


def test_a_block_that_is_called_twice_is_merged():
    block, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)
    network = nn.Sequential(block, block, nn.Linear(4, 2))
    train_only(network, Delta(["0.0"]))
    block[0].delta.data = torch.randn(4, 4)
    torch.testing.assert_close(merged(network)(x), network(x))


def test_code_that_reads_the_weight_gets_the_adapted_one():
    """PyTorch's attention never calls `out_proj`, but reads its weight."""
    attention, x = nn.MultiheadAttention(4, 2), torch.randn(3, 1, 4)
    train_only(attention, LoRA(rank=2, layers=["out_proj"], head=False))
    before = attention(x, x, x)[0]
    attention.out_proj.lora_B.data = torch.randn(4, 2)
    actual, plain = attention(x, x, x)[0], merged(attention)
    assert type(plain.out_proj) is not LoRALayer
    torch.testing.assert_close(actual, plain(x, x, x)[0])
    assert not torch.allclose(actual, before)


def test_convolutions_have_dense_updates_too():
    network = SmallCNN()
    train_only(network, Delta(head=False))
    layer = next(m for m in network.modules() if isinstance(m, DeltaLayer))
    assert isinstance(layer.base, nn.Conv2d)
    layer.delta.data = torch.randn_like(layer.delta)
    x = torch.randn(2, layer.base.in_channels, 5, 5)
    plain = nn.functional.conv2d(
        x, layer.base.weight + layer.delta, layer.base.bias, padding=layer.base.padding
    )
    torch.testing.assert_close(layer(x), plain)


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("head", ["5.weight", "5.bias"]),
        ("bias", ["0.bias", "2.bias", "3.bias", "4.bias", "5.weight", "5.bias"]),
        ("norm", ["3.weight", "3.bias", "5.weight", "5.bias"]),
        ("all", [n for n, _ in layers().named_parameters()]),
        (Trainable("bias", head=False), ["0.bias", "2.bias", "3.bias", "4.bias", "5.bias"]),
        (LoRA(rank=1, layers=["0"], freeze_a=True), ["0.lora_B", "5.weight", "5.bias"]),
    ],
    ids=["head", "bias", "norm", "all", "biases alone", "a frozen factor"],
)
def test_what_is_trained(word, names):
    network = layers()
    train_only(network, word)
    assert [n for n, p in network.named_parameters() if p.requires_grad] == names


class Blocks(nn.Module):
    """An embedding, four blocks, a layer after them, and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))
        self.last, self.head = nn.Linear(4, 4), nn.Linear(4, 2)


def test_the_last_blocks_alone_and_what_comes_after_them():
    network = Blocks()
    assert block_names(network) == [f"blocks.{i}" for i in range(4)]
    train_only(network, LoRA(rank=1, last_blocks=2))
    assert list(adapted_layers(network)) == ["blocks.2.0", "blocks.3.0", "last"]


def test_a_body_of_16_bits_keeps_them_and_its_adapters_have_32():
    network = MLP(5, (4,), 3).bfloat16()
    train_only(network, LoRA(rank=1))
    kinds = {(p.requires_grad, p.dtype) for p in network.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    layer = next(iter(adapted_layers(network).values()))
    assert isinstance(layer, LoRALayer)
    assert layer(torch.randn(2, 5).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("loar", "'loar'; it must be one of lora, delta"),
        (lambda: LoRA(layers=["query"]), r"LoRA.layers: 'query' matches none .* end in 0, 2, 4$"),
        (lambda: LoRA(rank=5), "LoRA.rank: 5; the layer 0 has at most rank 4"),
        (lambda: LoRA(rank=0), "LoRA.rank: 0; it must be at least 1"),
        (lambda: LoRA(alpha=0), "LoRA.alpha: 0; it must be positive"),
        (lambda: LoRA(pair=1.0), "LoRA.pair: 1.0; it must be between"),
        (lambda: LoRA(last_blocks=7), "LoRA.last_blocks: 7; Sequential has 0 blocks"),
        (lambda: Bottleneck(size=0), "Bottleneck.size: 0"),
        (lambda: SoftPrompt(), "SoftPrompt: Sequential takes no prompt"),
        (lambda: SoftPrompt(length=0), "SoftPrompt.length: 0"),
        (lambda: Trainable("biases"), "Trainable.part: 'biases'; it must be one of head"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 9 else "",
)
def test_mistakes_have_one_line(what, message):
    with pytest.raises(ValueError, match=message) as caught:
        train_only(layers(), what if isinstance(what, str) else what())
    assert "\n" not in str(caught.value)


def test_a_network_without_layers_for_adapters_is_named_with_the_kind_that_it_lacks():
    """All numbers of a recurrent layer stand in itself, and the head is the one linear layer."""
    network = nn.Sequential(nn.LSTM(4, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"Sequential, which has no Linear besides its head$"):
        train_only(network, Bottleneck())


def test_a_network_with_adapters_is_refused():
    network = layers()
    train_only(network, LoRA(rank=1))
    with pytest.raises(ValueError, match=re.escape("has adapters already (LoRALayer)")):
        train_only(network, "delta")
    with pytest.raises(ValueError, match="no parameter for 'norm'"):
        train_only(MLP(3), "norm")
