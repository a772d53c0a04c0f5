"""Chunks of clients: which samples they see when."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from datamodules import Partition, Ragged, Sampled, SplitOwn, TensorDataModule, TensorSamples
from pfl.clients import ClientData, Clients, LocalSchedule, sample_order
from pfl.datamodules.transforms.transform import Pipeline

SIZES = [3, 10, 0, 7, 10, 1]  # of clients 0 ... 5, one without samples
BY_SIZE = [1, 4, 3, 0, 5, 2]


def data(sizes=SIZES, shared=4, seed=0, dtype=torch.float32, device="cpu"):
    """Sample i has input (i, -i) and target i; clients own them in a shuffled order.

    Training samples as `sizes` says, the same numbers in reverse for validation, and the last
    `shared` samples as everyone's test set.
    """
    total = 2 * sum(sizes) + shared
    values = torch.arange(total)
    dealt = np.random.default_rng(5).permutation(2 * sum(sizes))
    partition = Partition(
        Ragged.from_sizes(dealt[: sum(sizes)], np.array(sizes)),
        Ragged.from_sizes(dealt[sum(sizes) :], np.array(sizes[::-1])),
        Ragged.shared(np.arange(total - shared, total), len(sizes)),
    )
    samples = TensorSamples(torch.stack([values, -values], 1).to(dtype), values)
    return ClientData(
        SimpleNamespace(partition=partition, samples=samples, transforms=Pipeline()), device, seed
    )


def chunk(ids, split="train", round_index=0, **kwargs):
    return Clients(np.array(ids, np.int64), round_index, data(**kwargs), split)


def walk(clients, *args, **kwargs):
    """Per client the list of its batches, each a list of sample indices (padding taken off)."""
    seen = {int(i): [] for i in clients.ids}
    for batch in clients.batches(LocalSchedule(*args, **kwargs)):
        assert batch.inputs.shape == (len(batch.counts), max(batch.counts), 2)
        assert torch.equal(batch.inputs[..., 0], batch.targets.float())
        assert torch.equal(batch.inputs[..., 1], -batch.targets.float())
        for row, count in enumerate(batch.counts):
            assert count > 0
            seen[int(clients.ids[row])].append(batch.targets[row, :count].tolist())
    return seen


def own(clients, client):
    return sorted(getattr(clients.data.splits, clients.split)[client].tolist())


# ---- data ----------------------------------------------------------------------------------------


def test_client_data_has_sizes_and_samples_by_client_id():
    d = data()
    assert d.sizes("train", np.array([4, 2, 0])).tolist() == [10, 0, 3]
    assert d.sizes("val", np.array([4, 2, 0])).tolist() == [10, 7, 1]
    assert d.sizes("test", np.array([4, 2])).tolist() == [4, 4]
    assert [d.shared(split) for split in ("train", "val", "test")] == [False, False, True]
    for split in ("train", "val", "test"):
        indices, starts = d.owned(split, np.array([4, 0]))
        for start, client in zip(starts.tolist(), (4, 0), strict=True):
            expected = getattr(d.splits, split)[client].tolist()
            assert indices[start : start + len(expected)].tolist() == expected


def test_gather_takes_the_models_dtype_and_leaves_classes_alone():
    x, y = data().gather(
        torch.tensor([[3, 1], [0, 2]], dtype=torch.int32), torch.float64, np.zeros((2, 1), int)
    )
    assert x.dtype == torch.float64
    assert y.dtype == torch.int64
    assert y.tolist() == [[3, 1], [0, 2]]
    assert x[0, 0].tolist() == [3, -3]
    d = data()
    d.samples = TensorSamples(torch.arange(4).view(2, 2), torch.rand(2, dtype=torch.float32))
    x, y = d.gather(torch.tensor([1]), torch.float64, np.array([0]))
    assert x.dtype == torch.int64  # tokens stay tokens
    assert y.dtype == torch.float64


# ---- mini-batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 16])
def test_every_epoch_is_a_permutation_in_batches(batch_size):
    clients, epochs = chunk(BY_SIZE), 3
    seen = walk(clients, batch_size, epochs=epochs)
    assert not seen[2]
    for client, size in enumerate(SIZES):
        if not size:
            continue
        per_epoch = -(-size // batch_size)
        lengths = [batch_size] * (per_epoch - 1) + [size - batch_size * (per_epoch - 1)]
        assert [len(b) for b in seen[client]] == lengths * epochs
        orders = []
        for epoch in range(epochs):
            part = seen[client][epoch * per_epoch : (epoch + 1) * per_epoch]
            orders.append([sample for batch in part for sample in batch])
            assert sorted(orders[-1]) == own(clients, client)
        if size == 10:  # two epochs in the same order: probability 1 / 10!
            assert orders[0] != orders[1] != orders[2] != orders[0]
            assert orders[0] != own(clients, client)


def test_a_full_batch_is_all_samples_in_the_clients_order():
    clients = chunk(BY_SIZE)
    seen = walk(clients, None, epochs=2)
    for client, size in enumerate(SIZES):
        expected = clients.data.splits.train[client].tolist()
        assert seen[client] == ([expected] * 2 if size else [])


@pytest.mark.parametrize("steps", [1, 2, 5, 7])
def test_a_number_of_steps_runs_over_as_many_epochs_as_it_takes(steps):
    clients = chunk(BY_SIZE)
    by_steps = walk(clients, 4, steps=steps)
    by_epochs = walk(clients, 4, epochs=7)  # the smallest clients have one step an epoch
    for client, size in enumerate(SIZES):
        assert len(by_steps[client]) == (steps if size else 0)
        assert by_steps[client] == by_epochs[client][:steps]
    assert [len(b) for b in walk(clients, None, steps=steps)[0]] == [3] * steps


@pytest.mark.parametrize("batch_size", [1, 4, None])
@pytest.mark.parametrize("steps", [None, 23])
@pytest.mark.parametrize("visits", [1, 40, 1 << 20])
def test_how_much_is_laid_out_at_a_time_changes_nothing(batch_size, steps, visits, monkeypatch):
    """A run has at least one epoch of the largest client, and at most the visits that fit."""
    clients = chunk(BY_SIZE)
    expected = walk(clients, batch_size, 3, steps)
    monkeypatch.setattr(sample_order, "VISITS", visits)
    assert walk(clients, batch_size, 3, steps) == expected
    epoch = -(-10 // (batch_size or 10))
    blocks = list(clients.step_blocks(LocalSchedule(batch_size, 3, steps)))
    assert all(len(b.counts) <= max(epoch, visits) for b in blocks)
    # 10, 10, 7, 3 and 1 samples: how many different numbers of steps there are, if not given.
    different = 1 if steps else {1: 4, 4: 3, None: 1}[batch_size]
    assert len(blocks) == different if visits == 1 << 20 else len(blocks) >= different


@pytest.mark.parametrize("parts", [2, 3])
def test_some_of_the_clients_see_what_they_see_among_all(parts):
    clients = chunk(BY_SIZE)
    everyone = walk(clients, 4, 2)
    for part in range(parts):
        for client, seen in walk(clients.rows(slice(part, None, parts)), 4, 2).items():
            assert client in BY_SIZE[part::parts]
            assert seen == everyone[client]


def test_clients_finish_in_order():
    """Batches of 4: 10, 10, 7, 3, 1 and 0 samples are 3, 3, 2, 1, 1 and 0 steps an epoch."""
    clients = chunk(BY_SIZE)
    counts = [batch.counts for batch in clients.batches(LocalSchedule(4, epochs=2))]
    assert [len(c) for c in counts] == [5, 5, 3, 3, 2, 2]
    assert counts[0] == [4, 4, 4, 3, 1]
    assert counts[1] == [4, 4, 3, 3, 1]  # the third has its short batch, others begin again
    assert counts[2] == [2, 2, 4]
    assert counts[3] == [4, 4, 3]
    assert counts[4:] == [[4, 4], [2, 2]]


def test_steps_are_known_beforehand():
    clients = chunk(BY_SIZE)
    assert len(clients) == 6
    assert clients.sizes.tolist() == [10, 10, 7, 3, 1, 0]
    for schedule, steps in [
        (LocalSchedule(4, 2), [6, 6, 4, 2, 2, 0]),
        (LocalSchedule(4, 2, 5), [5, 5, 5, 5, 5, 0]),
        (LocalSchedule(None, 2), [2, 2, 2, 2, 2, 0]),
        (LocalSchedule(None, 2, 5), [5, 5, 5, 5, 5, 0]),
    ]:
        assert schedule.steps_of(clients.sizes).tolist() == steps
    for args in [(4, 2, None), (3, 1, 5), (None, 3, None)]:
        taken = [len(b) for b in walk(clients, *args).values()]
        assert taken == LocalSchedule(*args).steps_of(clients.sizes).tolist()


def test_nothing_to_do_is_no_batch():
    assert not list(chunk([]).batches(LocalSchedule(4)))
    assert not list(chunk([2]).batches(LocalSchedule(4, steps=3)))
    assert not list(chunk([2]).batches(LocalSchedule(None)))
    assert LocalSchedule(4, 1, 3).steps_of(chunk([]).sizes).tolist() == []


@pytest.mark.parametrize("batch_size", [1, 4, None])
@pytest.mark.parametrize("steps", [None, 5])
def test_the_batches_of_a_client_do_not_depend_on_its_chunk(batch_size, steps):
    together = walk(chunk(BY_SIZE, round_index=3), batch_size, 2, steps)
    for ids in ([1], [3], [0], [5], [4, 0], [1, 3, 5], [4, 1]):
        for client, batches in walk(chunk(ids, round_index=3), batch_size, 2, steps).items():
            assert batches == together[client]


def test_padding_is_a_sample_of_the_same_client():
    """So that whatever a network does with it, no other client's data is in the row."""
    clients = chunk(BY_SIZE)
    for batch in clients.batches(LocalSchedule(4, epochs=2)):
        for row, client in zip(batch.targets, clients.ids, strict=False):
            assert set(row.tolist()) <= set(own(clients, int(client)))


def test_the_order_is_a_function_of_seed_purpose_round_client_and_epoch():
    def order(client=1, **kwargs):
        purpose = kwargs.pop("purpose", "train")
        clients = chunk([client], **kwargs)
        places = {s: i for i, s in enumerate(clients.data.splits.train[client].tolist())}
        batches = walk(clients, 10, 2, purpose=purpose)[client]
        return [[places[s] for s in batch] for batch in batches]

    first = order()
    torch.manual_seed(1)
    np.random.seed(1)
    assert order() == first
    # Client 4 has as many samples as client 1. Equal orders of 10 have probability 1 / 10!.
    others = [order(seed=1), order(round_index=1), order(client=4), order(purpose="personal")]
    flat = [tuple(epoch) for orders in [first, *others] for epoch in orders]
    assert len(set(flat)) == 10


def test_seeds_for_the_network_depend_on_client_and_step_alone():
    def seeds(ids, **kwargs):
        clients = chunk(ids, **kwargs)
        return {
            (int(clients.ids[row]), step): batch.origin.seed(row)
            for step, batch in enumerate(clients.batches(LocalSchedule(4, 2)))
            for row in range(batch.clients)
        }

    together = seeds(BY_SIZE)
    assert len(set(together.values())) == len(together) == 6 + 6 + 4 + 2 + 2
    for key, value in {**seeds([3, 0]), **seeds([4])}.items():
        assert together[key] == value
    for other in (seeds([4], round_index=1), seeds([4], seed=1)):
        assert not set(other.values()) & set(together.values())


# ---- all samples ---------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 10, 512])
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_samples_come_once_and_in_order(split, limit):
    ids = {"train": BY_SIZE, "val": [5 - i for i in BY_SIZE], "test": [3, 0, 2]}[split]
    clients = chunk(ids, split)
    seen = {i: [] for i in ids}
    for rows, batch in clients.samples(limit):
        assert rows == slice(0, batch.clients)
        assert max(batch.counts) == batch.inputs.shape[1] <= limit
        for row, count in enumerate(batch.counts):
            assert count > 0
            seen[ids[row]] += batch.targets[row, :count].tolist()
    for client in ids:
        assert seen[client] == getattr(clients.data.splits, split)[client].tolist()


@pytest.mark.parametrize("limit", [1, 2, 7, 31, 4096])
@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("ids", [BY_SIZE, [2, 0, 4], [2], []], ids=str)
def test_pooled_samples_come_once_with_their_owner(split, limit, ids):
    clients = chunk(ids, split)
    owners, seen = [], []
    for rows, index in clients.pooled(limit):
        assert len(rows) == len(index) <= limit
        owners += rows.tolist()
        seen += index.tolist()
    expected = [
        (row, sample)
        for row, client in enumerate(ids)
        for sample in getattr(clients.data.splits, split)[client].tolist()
    ]
    assert list(zip(owners, seen, strict=True)) == expected


def test_no_samples_are_no_batches():
    assert not list(chunk([]).samples())
    assert not list(chunk([2]).samples())


# ---- samples that are drawn when asked for -------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_samples_drawn_when_asked_for_come_like_stored_ones(split):
    values = torch.arange(60)
    arguments = dict(num_clients=100, partition=Sampled(10), protocol=SplitOwn(0.3, 0.2))
    drawn = TensorDataModule(torch.stack([values, -values], 1).float(), values, **arguments)
    parts = drawn.partition
    kept = [Ragged.from_sizes(p.flat, p.sizes) for p in (parts.train, parts.val, parts.test)]
    stored = SimpleNamespace(
        partition=Partition(*kept), samples=drawn.samples, transforms=drawn.transforms
    )
    ids = np.array([17, 99, 3, 42])
    some = [Clients(ids, 2, ClientData(module, seed=5), split) for module in (drawn, stored)]
    for size in (3, None):
        one, other = (walk(clients, size, 2) for clients in some)
        assert one == other and len(one[99]) > 0
    for read in (lambda c: c.samples(2), lambda c: c.pooled(7)):
        for one, other in zip(*(list(read(clients)) for clients in some), strict=True):
            assert np.array_equal(np.arange(4)[one[0]], np.arange(4)[other[0]])
            one, other = (getattr(x, "targets", x) for x in (one[1], other[1]))
            assert torch.equal(one.long(), other.long())
    index, starts = some[0].data.owned(split, ids)
    size = getattr(parts, split).size
    assert starts.tolist() == [0, size, 2 * size, 3 * size]
    assert index.tolist() == getattr(parts, split).of(ids).tolist()


def test_samples_in_order_are_the_same_and_consecutive_ones_are_no_copies():
    own = data()
    ordered = own.in_order("val")
    assert own.in_order("val") is ordered is not own  # copied once
    everyone = np.arange(len(SIZES))
    by_size = np.argsort(-own.sizes("val", everyone), kind="stable")
    for ids in (by_size, by_size[[0, 3]]):
        pair = (Clients(ids, 0, one, "val").samples(3) for one in (own, ordered))
        for (rows, batch), (rows_there, there) in zip(*pair, strict=True):
            assert rows == rows_there and batch.counts == there.counts
            assert torch.equal(batch.inputs, there.inputs)
            assert torch.equal(batch.targets, there.targets)
    whole = ordered.owned("val", everyone)[0]
    inputs, targets = ordered.gather(whole, torch.float32, everyone)
    assert targets.tolist() == own.splits.val.flat.tolist()  # client by client
    begin = ordered.samples.inputs.data_ptr()
    assert inputs.data_ptr() == begin
    reverse, _ = ordered.gather(whole.flip(0), torch.float32, everyone)
    assert torch.equal(reverse.flip(0), inputs) and reverse.data_ptr() != begin


def test_a_view_keeps_what_is_its_own():
    """The samples of one owner, laid out in order, are one client's there and everyone's here."""
    own = data()
    everyone = np.arange(len(SIZES))
    pooled = own.as_one_client(everyone)
    assert pooled.in_order("train").sizes("train", np.arange(1)).tolist() == [sum(SIZES)]
    assert own.in_order("train").sizes("train", everyone).tolist() == list(SIZES)


def test_samples_are_not_laid_out_where_it_takes_much_memory_or_they_are_changed(monkeypatch):
    own = data()
    assert own.in_order("test") is own  # which is everyone's
    own.transforms = Pipeline([lambda inputs, *_: inputs])
    assert own.in_order("val") is own
    own = data()
    monkeypatch.setattr("pfl.clients.view.COPY", own.samples.nbytes // 3)  # a third of all samples
    assert own.in_order("val") is own  # which is nearly half
