"""What clients remember: whole and sparse rows, in memory, files and checkpoints."""

import gc
import os
import warnings

import numpy as np
import pytest
import torch

from datamodules import ConfigError
from pfl.clients.memory_tiers import SMALLEST
from pfl.clients.store import ClientStore

IN_MEMORY_AND_MAPPED = pytest.mark.parametrize("memory", [None, 0], ids=["memory", "mapped"])
WHOLE_AND_SPARSE = pytest.mark.parametrize("sparse", [False, True], ids=["whole", "sparse"])


def store(memory=None, sparse=False, clients=5, directory=None):
    kept = ClientStore(clients, memory=memory, directory=directory)
    kept.declare("a", torch.tensor([1.0, 2.0, 3.0]), sparse=sparse)
    kept.declare("b", torch.tensor([7], dtype=torch.int64), sparse=sparse)
    return kept


def one(width, memory=None, clients=10, initial=0.0, directory=None, **options):
    kept = ClientStore(clients, memory=memory, directory=directory)
    kept.declare("a", torch.full((width,), initial), **options)
    return kept


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@IN_MEMORY_AND_MAPPED
@WHOLE_AND_SPARSE
def test_a_client_starts_with_the_initial_value(memory, sparse):
    kept = store(memory, sparse)
    assert kept.names == ["a", "b"]
    assert kept.read("a", np.array([3, 0])).tolist() == [[1, 2, 3], [1, 2, 3]]
    assert kept.read("b", np.array([4])).tolist() == [[7]]
    assert kept.read("b", np.array([4])).dtype == torch.int64
    assert kept.read("a", np.array([], np.int64)).shape == (0, 3)
    assert kept.seen("a").tolist() == []
    assert not any(kept.tiers.used.values())  # nobody took part, nothing is taken


@IN_MEMORY_AND_MAPPED
@WHOLE_AND_SPARSE
def test_rows_are_kept_by_client(memory, sparse):
    kept = store(memory, sparse)
    kept.write("a", np.array([4, 1]), torch.tensor([[4.0, 4, 4], [1, 1, 1]]))
    kept.write("a", np.array([1]), torch.tensor([[5.0, 0, 0]]))
    assert kept.read("a", np.array([1, 0, 4])).tolist() == [[5, 0, 0], [1, 2, 3], [4, 4, 4]]
    assert kept.seen("a").tolist() == [1, 4]
    assert kept.seen("b").tolist() == []  # states are apart
    tier = "memory" if memory is None else "file"
    assert {name for name, used in kept.tiers.used.items() if used} == {tier}


@IN_MEMORY_AND_MAPPED
@WHOLE_AND_SPARSE
def test_rows_are_copies(memory, sparse):
    kept = store(memory, sparse)
    values = torch.ones(1, 3)
    kept.write("a", np.array([2]), values)
    values.fill_(9)
    assert kept.read("a", np.array([2])).tolist() == [[1, 1, 1]]
    read = kept.read("a", np.array([2, 0]))
    read.fill_(9)
    assert kept.read("a", np.array([2, 0, 1])).tolist() == [[1, 1, 1], [1, 2, 3], [1, 2, 3]]


@WHOLE_AND_SPARSE
def test_the_initial_value_is_a_copy(sparse):
    initial = torch.zeros(2)
    kept = ClientStore(3)
    kept.declare("a", initial, sparse=sparse)
    initial.fill_(9)
    assert not kept.read("a", np.array([0])).any()


@IN_MEMORY_AND_MAPPED
@WHOLE_AND_SPARSE
def test_values_take_the_states_dtype(memory, sparse):
    kept = store(memory, sparse)
    kept.write("a", np.array([0]), torch.full((1, 3), 0.5, dtype=torch.float64).requires_grad_())
    row = kept.read("a", np.array([0]))
    assert row.dtype == torch.float32
    assert not row.requires_grad
    assert row.tolist() == [[0.5] * 3]


@pytest.mark.parametrize("shape", [(1, 3), (2, 4), (2, 1)])
def test_one_row_of_the_states_width_for_each_client(shape):
    with pytest.raises(ValueError, match=r"client state 'a' is \[.*\], not \[2, 3\]"):
        store().write("a", np.array([0, 1]), torch.zeros(shape))


# ---- sizes: many clients, and less memory than they need -----------------------------------------


def test_memory_grows_with_the_clients_that_took_part():
    """Three of a million clients, 400 KB a row: two blocks, of 2 and of 5 rows, not 400 GB."""
    width = 100_000
    kept = one(width, clients=1_000_000)
    kept.write("a", np.array([999_999, 5]), torch.ones(2, width))
    assert kept.tiers.used["memory"] == SMALLEST // (4 * width) * 4 * width
    kept.write("a", np.array([17]), torch.ones(1, width))
    both = SMALLEST // (4 * width) + 2 * SMALLEST // (4 * width)
    assert kept.tiers.used["memory"] == both * 4 * width
    assert kept.read("a", np.array([17, 3, 999_999])).sum(1).tolist() == [width, 0, width]


def test_a_block_is_not_larger_than_the_population():
    kept = one(10, clients=6)
    kept.write("a", np.array([3]), torch.ones(1, 10))
    assert kept.tiers.used["memory"] == 6 * 10 * 4


def test_rows_that_do_not_fit_into_memory_go_to_files():
    """Rows of 12 bytes and memory for seven of them; what was there first stays there."""
    rng = np.random.default_rng(0)
    kept, free = one(3, memory=7 * 12 + 5, clients=40), one(3, clients=40)
    for _ in range(20):
        ids = rng.permutation(40)[: rng.integers(1, 6)]
        values = torch.from_numpy(rng.normal(size=(len(ids), 3))).float()
        for one_of in (kept, free):
            one_of.write("a", ids, values)
    everyone = rng.permutation(40)
    assert torch.equal(kept.read("a", everyone), free.read("a", everyone))
    assert kept.tiers.used["memory"] == 7 * 12
    assert kept.tiers.used["file"] >= (len(kept.seen("a")) - 7) * 12 > 0
    assert free.tiers.used["file"] == 0


def test_processes_share_the_memory_of_a_machine():
    assert ClientStore(4, memory=100, processes=3).tiers.limit["memory"] == 33
    alone, shared = (ClientStore(4, processes=n).tiers.limit["memory"] for n in (1, 4))
    assert 3 < alone / shared < 5  # what is free changes between the two


@WHOLE_AND_SPARSE
def test_rows_that_cross_groups_and_blocks_come_back(sparse):
    """Rows of 400 KB: five in a group that is copied at a time, two in the first block."""
    rng, width = np.random.default_rng(0), 100_000
    kept = one(width, clients=30, sparse=sparse)
    values = torch.randn(30, width, generator=torch.Generator().manual_seed(0))
    for ids in np.split(rng.permutation(30), [1, 4, 17]):
        kept.write("a", ids, values[ids])
    assert kept.tiers.used["memory"] >= 30 * width * 4
    for ids in (np.arange(30), rng.permutation(30), np.array([7])):
        assert torch.equal(kept.read("a", ids), values[ids])


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    kept = one(3, memory=0, directory=str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        kept.write("a", np.array([0]), torch.ones(1, 3))
    message = str(caught.value)
    assert message.startswith("loop.state_memory") and "\n" not in message
    assert all(word in message for word in ("No space left", str(tmp_path), "TMPDIR"))
    assert not list(tmp_path.iterdir())


@IN_MEMORY_AND_MAPPED
def test_a_store_cleans_up_without_a_word(tmp_path, memory):
    """A process that is killed leaves no file either: files have no name from the beginning."""
    kept = store(memory, directory=str(tmp_path))
    kept.write("a", np.array([0]), torch.zeros(1, 3))
    assert not list(tmp_path.iterdir())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del kept
        gc.collect()
    assert not [str(w.message) for w in caught]


# ---- how rows are stored -------------------------------------------------------------------------


@IN_MEMORY_AND_MAPPED
@WHOLE_AND_SPARSE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_round_what_is_written_and_take_half(memory, sparse, dtype):
    width = 2 * SMALLEST
    kept = one(width, memory, clients=1, initial=1 / 3, dtype=dtype, sparse=sparse)
    assert same_bits(kept.read("a", np.array([0])), torch.full((1, width), 1 / 3))  # not rounded
    values = torch.randn(1, width, generator=torch.Generator().manual_seed(0))
    kept.write("a", np.array([0]), values)
    assert same_bits(kept.read("a", np.array([0])), values.to(dtype).float())
    assert sum(kept.tiers.used.values()) == 2 * width


def test_whole_numbers_are_not_rounded():
    kept = ClientStore(2)
    kept.declare("n", torch.tensor([0]), dtype=torch.bfloat16)
    kept.write("n", np.array([1]), torch.tensor([[257]]))  # bfloat16 has 8 bits for it
    assert kept.read("n", np.array([1])).tolist() == [[257]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.3, 0.49, 0.51, 0.9, 1.0])
def test_sparse_rows_are_exact_at_every_density(dtype, density):
    rng = np.random.default_rng(1)
    values = torch.from_numpy(rng.normal(size=(6, 501))).to(dtype)
    values[torch.from_numpy(rng.random((6, 501)) >= density)] = 0
    values[0, :3] = torch.tensor([torch.nan, -torch.inf, torch.inf])
    kept = ClientStore(9)
    kept.declare("a", torch.zeros(501, dtype=dtype), sparse=True)
    kept.write("a", np.array([5, 1, 8, 0, 2, 3]), values)
    assert same_bits(kept.read("a", np.array([5, 1, 8, 0, 2, 3])), values)


def test_negative_zeros_are_zeros():
    kept = one(4, sparse=True)
    kept.write("a", np.array([0]), torch.tensor([[0.0, -0.0, -3.0, -0.0]]))
    assert kept.read("a", np.array([0])).tolist() == [[0, 0, -3, 0]]
    assert kept._states["a"]._logs[0].live == 8 + 8  # one value and its column, each padded to 8


def test_sparse_rows_take_as_much_as_they_need():
    """A value and its column are 8 bytes, and rows begin at multiples of 8; half full: as whole."""
    width, clients = 10_000, 400
    kept, whole = (one(width, clients=clients, sparse=sparse) for sparse in (True, False))
    values = torch.zeros(clients, width)
    values[:, ::20] = 1.0  # 500 of 10,000
    for store in (kept, whole):
        store.write("a", np.arange(clients), values)
    assert sum(log.live for log in kept._states["a"]._logs) == clients * 500 * 8
    assert kept.tiers.used["memory"] <= whole.tiers.used["memory"] / 4
    values[:, ::2] = 1.0
    kept.write("a", np.arange(clients), values)
    assert sum(log.live for log in kept._states["a"]._logs) == clients * width * 4


@IN_MEMORY_AND_MAPPED
def test_rows_written_again_and_again_do_not_pile_up(memory):
    """Live rows of 4 MB; 60 rounds append 120 MB."""
    rng, width, clients = np.random.default_rng(2), 25_000, 100
    kept = one(width, memory, clients=clients, sparse=True)
    expected = torch.zeros(clients, width)
    for _ in range(60):
        ids = rng.permutation(clients)[:50]
        values = torch.zeros(50, width)
        count = rng.integers(4_000, 6_000)
        values[:, rng.permutation(width)[:count]] = float(rng.normal())
        expected[ids] = values
        kept.write("a", ids, values)
        live = sum(log.live for log in kept._states["a"]._logs)
        # At most twice what is in use, and the block that is being filled.
        last = len(kept._states["a"]._logs[-1].bytes)
        assert sum(kept.tiers.used.values()) <= 2 * live + last
    assert torch.equal(kept.read("a", np.arange(clients)), expected)


# ---- reading ahead -------------------------------------------------------------------------------


@WHOLE_AND_SPARSE
def test_rows_are_read_ahead_from_files_only(sparse):
    near, far = one(3, sparse=sparse), one(3, memory=0, sparse=sparse)
    ids = np.array([4, 2, 9])
    values = torch.arange(9.0).view(3, 3)
    for kept in (near, far):
        kept.write("a", ids, values)
        kept.prefetch(ids)
    assert not near._ahead and len(far._ahead) == 1
    assert torch.equal(far.read("a", ids), values)
    assert not far._ahead  # read once


@WHOLE_AND_SPARSE
def test_what_is_written_is_never_read_from_before(sparse):
    kept = one(3, memory=0, sparse=sparse)
    ids = np.array([4, 2, 9])
    kept.write("a", ids, torch.ones(3, 3))
    kept.prefetch(ids)
    kept.write("a", np.array([0]), torch.ones(1, 3))
    assert len(kept._ahead) == 1  # not one of them
    kept.write("a", np.array([2, 7]), torch.full((2, 3), 5.0))
    assert kept.read("a", ids)[:, 0].tolist() == [1, 5, 1]
    state = kept.state_dict()
    kept.prefetch(ids)
    other = one(3, initial=8.0)
    kept.load_state_dict(other.state_dict())
    assert kept.read("a", ids).tolist() == [[8.0] * 3] * 3
    assert torch.equal(state["a"]["initial"], torch.zeros(3))


def test_rows_that_are_read_ahead_and_not_used_are_dropped():
    kept = one(3, memory=0)
    kept.write("a", np.arange(10), torch.ones(10, 3))
    for client in range(10):
        kept.prefetch(np.array([client]))
    assert len(kept._ahead) <= 2


# ---- checkpoints ---------------------------------------------------------------------------------


@WHOLE_AND_SPARSE
@pytest.mark.parametrize("source", [None, 0], ids=["memory", "mapped"])
@pytest.mark.parametrize("target", [None, 0], ids=["memory", "mapped"])
def test_the_store_comes_back_from_its_state(tmp_path, source, target, sparse):
    kept = store(source, sparse)
    kept.write("a", np.array([4, 1]), torch.tensor([[4.0, 4, 4], [1, 0, 0]]))
    kept.write("b", np.array([2]), torch.tensor([[-1]]))
    torch.save(kept.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True, mmap=True)
    other = ClientStore(5, memory=target)
    other.declare("a", torch.zeros(3), sparse=sparse)  # another initial value: the saved one counts
    other.declare("b", torch.tensor([0]))
    other.write("a", np.array([0]), torch.full((1, 3), 8.0))  # forgotten when loading
    other.load_state_dict(state)
    everyone = np.arange(5)
    rows = [[1, 2, 3], [1, 0, 0], [1, 2, 3], [1, 2, 3], [4, 4, 4]]
    assert other.read("a", everyone).tolist() == rows
    assert other.read("b", everyone).flatten().tolist() == [7, 7, -1, 7, 7]
    assert other.seen("a").tolist() == [1, 4]


@WHOLE_AND_SPARSE
def test_a_state_is_what_is_stored_and_no_copy_of_full_blocks(tmp_path, sparse):
    """Three rows of 1 MiB, which fill a block of one and one of two."""
    width = SMALLEST // 2
    kept = one(width, clients=9, dtype=torch.bfloat16, sparse=sparse)
    values = torch.randn(3, width, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    kept.write("a", np.array([8, 2, 5]), values)
    parts = kept.state_dict()["a"]["parts"]
    (name,) = set(parts[0]) & {"rows", "bytes"}
    assert [part["ids"].tolist() for part in parts] == [[8], [2, 5]]
    blocks = [part[name] for part in parts]
    assert [block.nbytes for block in blocks] == [SMALLEST, 2 * SMALLEST]
    assert blocks[0].data_ptr() == kept.state_dict()["a"]["parts"][0][name].data_ptr()
    torch.save(kept.state_dict(), tmp_path / "state")
    initial = 4 * width
    assert os.path.getsize(tmp_path / "state") < 3 * SMALLEST + initial + 10_000


@IN_MEMORY_AND_MAPPED
@WHOLE_AND_SPARSE
def test_a_process_takes_only_the_rows_that_it_keeps(memory, sparse):
    kept, other = store(memory, sparse), store(memory, sparse)
    everyone = np.arange(5)
    kept.write("a", everyone, torch.arange(5.0)[:, None].expand(5, 3))
    other.load_state_dict(kept.state_dict(), keep=lambda ids: ids % 2 == 1)
    assert other.seen("a").tolist() == [1, 3]
    assert other.read("a", everyone)[:, 0].tolist() == [1, 1, 1, 3, 1]  # 1 is where rows start


@WHOLE_AND_SPARSE
def test_the_states_of_several_processes_are_one(sparse):
    """Clients 0, 2, 4 on one process and 1, 3 on another: as if one had kept them all."""
    together, parts = store(sparse=sparse), [store(sparse=sparse), store(memory=0, sparse=sparse)]
    values = torch.arange(15.0).view(5, 3)
    together.write("a", np.arange(4), values[:4])
    for rank, part in enumerate(parts):
        mine = np.arange(rank, 4, 2)
        part.write("a", mine, values[mine])
    merged = store(sparse=sparse)
    state, other = (part.state_dict() for part in parts)
    for name, entry in state.items():
        entry["parts"] += other[name]["parts"]
    merged.load_state_dict(state)
    for name in together.names:
        assert merged.seen(name).tolist() == together.seen(name).tolist()
        assert torch.equal(merged.read(name, np.arange(5)), together.read(name, np.arange(5)))
