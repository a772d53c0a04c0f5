"""Bytes, counted by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from models import MLP, ResNet18
from pfl.communication import Ledger, dense, header, low_rank, low_rank_size, masked, sparse
from pfl.parameters import ParameterSpace
from tests.refusal import refused

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def width(dtype):
    return {torch.float32: 4, torch.float64: 8, torch.bfloat16: 2}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dense_sends_every_value(dtype):
    values = torch.zeros(3, 7, dtype=dtype)
    assert dense(values).nbytes == 7 * width(dtype)
    assert dense(values[0]).nbytes == 7 * width(dtype)
    assert dense(values).values is values


@BOTH
def test_part_sends_what_is_under_the_mask(dtype):
    mask = torch.tensor([True, False, True, True, False])
    values = torch.arange(10, dtype=dtype).view(2, 5)
    message = masked(values, mask)
    assert message.nbytes == 3 * width(dtype)
    expected = torch.tensor([[0, 0, 2, 3, 0], [5, 0, 7, 8, 0]], dtype=dtype)
    assert torch.equal(message.values, expected)  # the others stay at home
    assert masked(values, ~mask).nbytes == 2 * width(dtype)


def test_clients_have_one_mask():
    """With masks of two clients both would be counted for each."""
    with refused("masked", "a mask [2, 5]", "it must be [5]", "sparse(values)"):
        masked(torch.zeros(2, 5), torch.ones(2, 5, dtype=torch.bool))


@pytest.mark.parametrize(("sent", "read"), [((), (1,)), ((3,), (3,)), ((2, 3), (2, 3))])
def test_a_header_has_the_rows_of_a_message(sent, read):
    message = header(torch.ones(sent))
    assert message.values.shape == read
    assert message.nbytes == 0


@BOTH
def test_sparse_takes_the_smaller_of_indices_and_mask(dtype):
    """1,000 values: a mask takes 1000 / 8 = 125 bytes, indices 4 a value, so up to 31 values."""
    counts = [0, 1, 31, 32, 1000]
    values = torch.zeros(len(counts), 1000, dtype=dtype)
    for row, count in zip(values, counts, strict=True):
        row[:count] = -1.0
    message = sparse(values)
    positions = [0, 4, 31 * 4, 125, 125]  # 31 indices take 124 bytes, 32 would take 128
    assert message.nbytes.tolist() == [
        count * width(dtype) + extra for count, extra in zip(counts, positions, strict=True)
    ]
    assert message.nbytes.dtype == torch.int64
    for row, expected in zip(values, message.nbytes.tolist(), strict=True):
        assert int(sparse(row).nbytes) == expected


@pytest.mark.parametrize(("length", "mask"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_a_mask_takes_whole_bytes(length, mask):
    assert int(sparse(torch.ones(length)).nbytes) == 4 * length + min(4 * length, mask)


@BOTH
def test_low_rank_is_the_smaller_of_factors_and_layer(dtype):
    """Layers 3 x 8 and 5 x 3 and biases 3 + 5: factors r (3 + 8) or 24, r (5 + 3) or 15."""
    space = ParameterSpace(MLP(8, hidden=(3,), num_classes=5))
    ranks = torch.tensor([[0, 0], [1, 1], [2, 1], [2, 2], [3, 3], [1, 3]])
    sizes = [8 + a + b for a, b in [(0, 0), (11, 8), (22, 8), (22, 15), (24, 15), (11, 15)]]
    values = torch.zeros(6, space.size, dtype=dtype)
    message = low_rank(values, space, ranks)
    assert message.nbytes.tolist() == [n * width(dtype) for n in sizes]
    assert message.values is values
    for one, size in zip(ranks, sizes, strict=True):
        assert low_rank_size(space, one).dtype == torch.int64
        assert int(low_rank(values[0], space, one).nbytes) == size * width(dtype)


def test_a_convolution_is_counted_by_its_matrix():
    """64 x 32 x 3 x 3 as 192 x 96: rank 10 takes 10 (192 + 96) values, the layer 18,432."""
    space = ParameterSpace(nn.Conv2d(32, 64, 3))
    assert int(low_rank_size(space, torch.tensor([10]))) == 10 * 288 + 64
    # 64 (192 + 96) = 18,432: from rank 64 on the layer itself is no larger.
    assert int(low_rank_size(space, torch.tensor([63]))) == 63 * 288 + 64
    assert int(low_rank_size(space, torch.tensor([96]))) == 18432 + 64


def test_a_model_without_matrices_is_dense():
    space = ParameterSpace(nn.GroupNorm(1, 4))
    ranks = torch.zeros(3, 0, dtype=torch.int64)
    sizes = low_rank_size(space, ranks)
    assert sizes.tolist() == [8, 8, 8]
    assert sizes.dtype == torch.int64
    ledger = Ledger(3)
    ledger.add(np.arange(3), low_rank(torch.zeros(3, 8), space, ranks).nbytes, 0)
    assert ledger.downlink.tolist() == [32, 32, 32]


def test_the_ledger_books_each_client():
    ledger = Ledger(4)
    ledger.add(np.array([2, 0]), down=100, up=torch.tensor([7, 5]))
    ledger.add(np.array([2]), down=torch.tensor(50), up=1)
    ledger.add(np.array([], np.int64), down=1000, up=torch.zeros(0, dtype=torch.int64))
    assert ledger.downlink.tolist() == [100, 0, 150, 0]
    assert ledger.uplink.tolist() == [5, 0, 8, 0]


def test_the_ledger_takes_room_for_the_clients_it_met_only():
    """Two counts for each of 10^15 clients would be 16 PB."""
    ledger, ids = Ledger(10**15), np.array([10**15 - 1, 3])
    ledger.add(ids, down=torch.tensor([1, 2]), up=5)
    assert ledger.of(np.array([3, 4, 10**15 - 1])).tolist() == [[2, 0, 1], [5, 0, 5]]
    assert ledger.state_dict()["clients"].tolist() == [3, 10**15 - 1]


def test_the_ledger_counts_beyond_32_bits():
    ledger = Ledger(2)
    for _ in range(3):
        ledger.add(np.array([1]), down=2**40, up=torch.tensor([2**41]))
    assert ledger.downlink.tolist() == [0, 3 * 2**40]
    assert ledger.uplink.tolist() == [0, 3 * 2**41]


def test_the_ledger_comes_back_from_its_state():
    """The state holds only clients with bytes: it is small where few of many took part."""
    ledger, other = Ledger(3), Ledger(3)
    ledger.add(np.array([1, 2]), 10, torch.tensor([3, 4]))
    state = ledger.state_dict()
    assert state["clients"].tolist() == [1, 2]
    ledger.add(np.array([1]), 1, 1)  # the state is a copy, not a window
    other.load_state_dict(state)
    assert other.downlink.tolist() == [0, 10, 10]
    assert other.uplink.tolist() == [0, 3, 4]
    other.add(np.array([0]), 5, 5)  # and what was loaded is another copy
    assert state["downlink"].tolist() == [10, 10]
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    ledger.load_state_dict(state, other.state_dict())  # two processes' counts, instead of its own
    assert ledger.downlink.tolist() == [5, 20, 20]
    assert ledger.uplink.tolist() == [5, 6, 8]


def test_fedavg_with_resnet18_is_the_893_92_gb_of_the_fedslr_paper():
    """FedSLR, Table 2: 10 clients a round, 1,000 rounds, ResNet-18 with GroupNorm, 10 classes.

    11,173,962 values x 4 bytes x 2 directions x 10 clients x 1,000 rounds = 893.92 x 10^9 bytes.
    """
    space = ParameterSpace(ResNet18(num_classes=10))
    ledger = Ledger(100)
    down = dense(space.vector.detach())
    up = dense(down.values.expand(10, -1))
    for round_index in range(1000):
        cohort = (np.arange(10) + 10 * round_index) % 100
        ledger.add(cohort, down.nbytes, up.nbytes)
    total = int(ledger.downlink.sum() + ledger.uplink.sum())
    assert total == 11_173_962 * 4 * 2 * 10 * 1000
    assert f"{total / 1e9:.2f}" == "893.92"
    # Every client took part in 100 rounds.
    assert (ledger.uplink == 11_173_962 * 4 * 100).all()
