"""Flat vectors: they hold what the module holds, both ways, whatever PyTorch does to storage."""

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

from datamodules import TensorDataModule
from models import MLP, LeNet5
from pfl.algorithms import FedAvg
from pfl.parameters import BufferSpace, Layer, ParameterSpace, replace_values_in, values_in
from tests.problems import run
from tests.refusal import refused


class Tied(nn.Module):
    """Encoder and decoder share one 3 x 3 matrix: 9 + 3 + 3 parameters."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 3)
        self.decoder = nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


def flat(module):
    """The trainable values one after another, found without the code under test."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])


def assert_bound(space, module):
    """The module and the vector are one: a change of the one is a change of the other."""
    assert torch.equal(space.vector.detach(), flat(module))
    space.vector.data.copy_(torch.arange(space.size))
    start = 0
    for p in module.parameters():
        if p.requires_grad:
            values = torch.arange(start, start + p.numel(), dtype=p.dtype).view(p.shape)
            assert torch.equal(p.detach(), values)
            start += p.numel()
    assert start == space.size
    with torch.no_grad():
        for p in module.parameters():
            p.neg_()
    assert torch.equal(space.vector.detach(), flat(module))
    assert space.vector.detach()[-1] == -(space.size - 1)


# ---- layout ------------------------------------------------------------------------------------


def test_layers_lie_end_to_end_in_the_order_of_the_module():
    space = ParameterSpace(MLP(4, hidden=(3,), num_classes=2))
    assert space.layers == [
        Layer("body.linear1.weight", (3, 4), 0),
        Layer("body.linear1.bias", (3,), 12),
        Layer("head.weight", (2, 3), 15),
        Layer("head.bias", (2,), 21),
    ]
    assert space.size == 23
    ends = [0, 12, 15, 21, 23]
    assert [layer.span for layer in space.layers] == [*map(slice, ends, ends[1:])]
    assert [layer.size for layer in space.layers] == [12, 3, 6, 2]


def test_a_scalar_parameter_has_one_place():
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(2.0))
    module.shift = nn.Parameter(torch.tensor([3.0, 4.0]))
    space = ParameterSpace(module)
    assert space.layers == [Layer("scale", (), 0), Layer("shift", (2,), 1)]
    assert space.vector.tolist() == [2, 3, 4]
    assert space.split(torch.arange(6.0).view(2, 3))["scale"].tolist() == [0, 3]


def test_binding_keeps_the_values():
    module = LeNet5(image_size=16)
    before = flat(module)
    space = ParameterSpace(module)
    assert torch.equal(space.vector.detach(), before)
    assert torch.equal(flat(module), before)
    assert space.vector.is_leaf
    assert space.vector.requires_grad


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
def test_split_gives_the_parameters_by_name(batch):
    module = LeNet5(image_size=16)
    space = ParameterSpace(module)
    w = torch.randn(*batch, space.size)
    pieces = space.split(w)
    assert list(pieces) == [n for n, _ in module.named_parameters()]
    for name, p in module.named_parameters():
        assert pieces[name].shape == (*batch, *p.shape)
    joined = torch.cat([x.flatten(len(batch)) for x in pieces.values()], dim=-1)
    assert torch.equal(joined, w)
    pieces["head.bias"].zero_()  # views: a write goes through, and so gradients join
    assert (w[..., -10:] == 0).all()


def test_gradients_join_through_split():
    module = MLP(4, hidden=(3,), num_classes=2)
    space = ParameterSpace(module)
    x = torch.randn(5, 4)
    g = grad(lambda w: functional_call(module, space.split(w), (x,)).square().sum())(
        space.vector.detach()
    )
    module(x).square().sum().backward()
    torch.testing.assert_close(g, torch.cat([p.grad.reshape(-1) for p in module.parameters()]))


def test_point_makes_views_and_copies_nothing():
    module, other = MLP(4, (3,), 2), MLP(4, (3,), 2)
    space = ParameterSpace(module)
    w = torch.randn(3, space.size)
    space.point(space.parameters_of(other), w[1])
    assert torch.equal(flat(other), w[1])
    w[1, 5] = 7.0
    assert flat(other)[5] == 7.0
    assert not torch.equal(flat(module), w[1])


# ---- views ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [lambda: MLP(4, (3,), 2), Tied], ids=["MLP", "tied"])
def test_vector_and_module_are_one(build):
    module = build()
    assert_bound(ParameterSpace(module), module)


def test_they_stay_one_after_load_state_dict():
    module = Tied()
    space = ParameterSpace(module)
    values = {n: torch.full_like(v, 5.0) for n, v in module.state_dict().items()}
    module.load_state_dict(values)
    assert (space.vector == 5).all()
    assert_bound(space, module)


def test_an_optimizer_of_the_vector_moves_the_module():
    module = MLP(4, (3,), 2)
    space = ParameterSpace(module)
    before = flat(module)
    space.vector.grad = torch.ones(space.size)
    torch.optim.SGD([space.vector], lr=0.5).step()
    torch.testing.assert_close(flat(module), before - 0.5)


@pytest.mark.parametrize(
    "move",
    [lambda a: a.double(), lambda a: a.to(torch.float64), lambda a: a.to("cpu")],
    ids=["double", "to float64", "to cpu"],
)
def test_an_algorithm_stays_bound_when_it_is_moved(move):
    algorithm = FedAvg(Tied())
    before = flat(algorithm.network)
    optimizer = algorithm.configure_optimizers()
    move(algorithm)
    assert torch.equal(flat(algorithm.network), before.to(algorithm.global_model.dtype))
    assert algorithm.network.decoder.weight is algorithm.network.encoder.weight
    assert_bound(algorithm.space, algorithm.network)
    # The parameter object is the same, so an optimizer made before still moves the model.
    assert optimizer.param_groups[0]["params"][0] is algorithm.space.vector


def digits_like(num_clients=3, **kwargs):
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(30) % 3
    return TensorDataModule(x, y, num_clients=num_clients, **kwargs)


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_a_copied_algorithm_is_bound_again_when_it_is_set_up(tmp_path, precision):
    algorithm = FedAvg(Tied(), lr=0.5)
    other = copy.deepcopy(algorithm)
    before = flat(algorithm.network)
    run(other, digits_like(), 1, root=tmp_path, precision=precision)
    assert other.global_model.dtype == {"32": torch.float32, "64": torch.float64}[precision[:2]]
    assert not torch.equal(flat(other.network), before.to(other.global_model.dtype))
    assert_bound(other.space, other.network)
    assert torch.equal(flat(algorithm.network), before)
    assert_bound(algorithm.space, algorithm.network)


# ---- what belongs to it --------------------------------------------------------------------------


def test_tied_weights_are_one_entry():
    space = ParameterSpace(Tied())
    names = [layer.name for layer in space.layers]
    assert names == ["encoder.weight", "encoder.bias", "decoder.bias"]
    assert space.size == 9 + 3 + 3


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_frozen_parameters_are_no_part_and_never_move(tmp_path, weight_decay):
    network = MLP(3, hidden=(4,), num_classes=3)
    network.body.requires_grad_(False)
    algorithm = FedAvg(network, lr=0.5, weight_decay=weight_decay)
    assert [layer.name for layer in algorithm.space.layers] == ["head.weight", "head.bias"]
    assert algorithm.space.size == 3 * 4 + 3
    frozen = [p.detach().clone() for p in network.body.parameters()]
    before = flat(network)
    run(algorithm, digits_like(), 2, root=tmp_path, precision="32-true")
    for p, kept in zip(network.body.parameters(), frozen, strict=True):
        assert torch.equal(p, kept)
    assert not torch.equal(flat(network), before)
    # Nor are they sent: 15 floats of 4 bytes to and from 3 clients in 2 rounds.
    assert algorithm.progress.bytes_up == algorithm.progress.bytes_down == 15 * 4 * 3 * 2


def test_what_cannot_be_a_space_is_refused_in_one_line():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with refused("Linear", "no trainable parameter"):
        ParameterSpace(frozen)
    with refused("Flatten", "no trainable parameter"):
        ParameterSpace(nn.Flatten())
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with refused("Sequential", "torch.float32", "torch.float64"):
        ParameterSpace(mixed)
    lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    with refused("Sequential", "1.weight", "lazy"):
        ParameterSpace(lazy)
    statistics = nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(2, 2))
    with refused("Sequential", "buffer 0.running_mean", "lazy"):
        ParameterSpace(statistics)
    turned = nn.Linear(2, 2, dtype=torch.complex64)
    with refused("parameter weight of Linear", "torch.complex64", "view_as_complex"):
        ParameterSpace(turned)


def test_a_frozen_parameter_may_have_another_dtype():
    module = nn.Sequential(nn.Linear(2, 3).double().requires_grad_(False), nn.Linear(3, 1))
    assert ParameterSpace(module).size == 4


def test_a_lazy_module_is_fine_after_one_forward_pass():
    module = nn.Sequential(nn.LazyLinear(2))
    module(torch.zeros(1, 3))
    assert ParameterSpace(module).size == 3 * 2 + 2


# ---- matrices ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((), None),
        ((5,), None),
        ((3, 4), (3, 4)),
        ((3, 4, 2), (3, 4 * 2)),  # a 1-D convolution
        ((3, 4, 2, 5), (3 * 2, 4 * 5)),
        ((3, 4, 2, 5, 6), (3, 4 * 2 * 5 * 6)),  # a 3-D convolution
    ],
)
def test_matrix_shapes_of_layers(shape, matrix):
    assert Layer("x", shape, 0).matrix_shape == matrix


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
def test_a_convolution_as_a_matrix_by_its_definition(batch):
    """W[(o,u),(i,v)] = w[o,i,u,v], written out with loops; rows count o first, columns i first."""
    o, i, d1, d2 = 3, 2, 4, 5
    layer = Layer("conv", (o, i, d1, d2), 0)
    w = torch.randn(*batch, o, i, d1, d2)
    expected = torch.full((*batch, o * d1, i * d2), torch.nan)
    for a, b, u, v in product(range(o), range(i), range(d1), range(d2)):
        expected[..., a * d1 + u, b * d2 + v] = w[..., a, b, u, v]
    matrix = layer.to_matrix(w.reshape(*batch, -1))
    assert torch.equal(matrix, expected)
    assert torch.equal(layer.from_matrix(matrix), w.reshape(*batch, -1))


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 2), (3, 2, 2, 2, 2)])
def test_other_tensors_keep_their_first_axis_as_rows(batch, shape):
    layer = Layer("x", shape, 0)
    w = torch.randn(*batch, *shape)
    matrix = layer.to_matrix(w.reshape(*batch, -1))
    assert torch.equal(matrix, w.flatten(len(batch) + 1))
    assert torch.equal(layer.from_matrix(matrix), w.reshape(*batch, -1))


def test_matrices_and_full_ranks():
    space = ParameterSpace(LeNet5(image_size=16))
    # conv 6 x 1 x 5 x 5 -> 30 x 5; conv 16 x 6 x 5 x 5 -> 80 x 30; a 1 x 1 image remains
    shapes = [(30, 5), (80, 30), (120, 16), (84, 120), (10, 84)]
    assert [layer.matrix_shape for layer in space.matrices] == shapes
    assert space.full_ranks.tolist() == [5, 30, 16, 84, 10]
    assert space.full_ranks.dtype == torch.int64


# ---- masks ---------------------------------------------------------------------------------------


def test_masks_by_pattern():
    space = ParameterSpace(MLP(4, hidden=(3,), num_classes=2))  # 12 + 3, then 6 + 2
    head = space.mask(["head.*"])
    assert head.dtype == torch.bool
    assert head.nonzero().flatten().tolist() == list(range(15, 23))
    assert torch.equal(space.mask(["body.*"]), ~head)
    bias = space.mask(["*.bias"]).nonzero().flatten().tolist()
    assert bias == [12, 13, 14, 21, 22]
    both = space.mask(["head.weight", "*.bias"]).nonzero().flatten().tolist()
    assert both == [12, 13, 14, *range(15, 23)]
    assert space.mask(["*"]).all()
    assert not space.mask([]).any()


def test_a_pattern_without_a_match_is_refused():
    space = ParameterSpace(MLP(4, hidden=(3,), num_classes=2))
    with refused("'tail.*'", "head.weight", "body.linear1.bias"):
        space.mask(["head.*", "tail.*"])
    with refused("'HEAD.*'"):  # names are case-sensitive on every platform
        space.mask(["HEAD.*"])
    with refused("model.personal: 'tail.*' matches none"):
        space.mask(["tail.*"], "model.personal")


def test_which_parameters_a_part_moves():
    space = ParameterSpace(MLP(4, hidden=(3,), num_classes=2))  # 12, 3, 6 and 2 values
    assert space.moving(space.mask(["head.*"])) == [False, False, True, True]
    assert space.moving(space.mask(["*.bias"])) == [False, True, False, True]
    with pytest.raises(ValueError, match=r"cuts body\.linear1\.weight"):
        space.moving(torch.arange(space.size) == 5)
    with pytest.raises(ValueError, match="no parameter"):
        space.moving(torch.zeros(space.size, dtype=torch.bool))


def test_values_in_a_part_are_taken_and_replaced():
    """As with a boolean index, also in some rows of a larger tensor."""
    part = torch.tensor([False, True, True, False, True])
    v, new = torch.arange(15.0).view(3, 5), -torch.arange(1.0, 7.0).view(2, 3)
    assert values_in(part, v).tolist() == [[1, 2, 4], [6, 7, 9], [11, 12, 14]]
    replace_values_in(part, v[:2], new)
    assert v.tolist() == [[0, -1, -2, 3, -3], [5, -4, -5, 8, -6], [10, 11, 12, 13, 14]]


# ---- buffers -------------------------------------------------------------------------------------


def test_buffers_round_trip_and_integers_are_rounded():
    module = nn.BatchNorm1d(2)
    space = BufferSpace(module, ["running_mean", "running_var", "num_batches_tracked"])
    assert space.size == 2 + 2 + 1
    like = torch.zeros(1, dtype=torch.float64)
    values = space.read(module, like)
    assert values.dtype == torch.float64
    assert values.tolist() == [0, 0, 1, 1, 0]
    space.write(module, torch.tensor([1.5, -2.0, 3.0, 4.0, 6.6]))
    assert module.running_mean.tolist() == [1.5, -2.0]
    assert module.running_var.tolist() == [3.0, 4.0]
    assert module.num_batches_tracked.item() == 7  # 6.6 is rounded, not cut
    assert module.num_batches_tracked.dtype == torch.int64
    assert space.read(module, like).tolist() == [1.5, -2.0, 3.0, 4.0, 7.0]


def test_no_buffers_are_an_empty_vector():
    module = nn.BatchNorm1d(2)
    space = BufferSpace(module)
    assert space.size == 0
    assert space.read(module, torch.zeros(3)).shape == (0,)
    space.write(module, torch.zeros(0))
    assert module.running_var.tolist() == [1, 1]
