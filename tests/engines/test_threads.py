"""Groups of clients in threads: the same models as all of them one after another."""

import threading

import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, Sizes
from models import CNN, MLP, LeNet5, SmallCNN
from pfl.algorithms import FedAvg, FedProx, FedSLR
from pfl.engines.batch import Batch, StepBlock, default_loss
from pfl.engines.local_step import Step
from pfl.engines.oracle import Oracle
from pfl.engines.threads import GROUP_FLOATS, ClientThreads
from pfl.parameters import ParameterSpace
from tests.problems import run


def batchnorm():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 10))


def dropout():
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))


def gelu():
    """What no chain of ours is: its threads run PyTorch's vmap."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 600), nn.GELU(), nn.Linear(600, 10))


def groups_of(network, side):
    """An oracle, and (models, batch, buffers) of five groups of two clients."""
    space = ParameterSpace(network)
    oracle = Oracle(network, space, default_loss)
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(5, 2, 4, 1, side, side, generator=rng)
    targets = torch.randint(10, (5, 2, 4), generator=rng)
    oracle.inspect(inputs[0, 0, :2], targets[0, 0, :2])
    w = space.vector.detach() + 0.1 * torch.randn(5, 2, space.size, generator=rng)
    batches = [Batch(x, y, [4, 3]) for x, y in zip(inputs, targets, strict=True)]
    buffers = torch.linspace(0.5, 1.5, oracle.buffers.size).repeat(5, 2, 1)
    return oracle, list(zip(w, batches, buffers, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize(
    ("make", "side"),
    [(LeNet5, 28), (SmallCNN, 8), (batchnorm, 8), (lambda: MLP(64), 8), (gelu, 8)],
    ids=["LeNet5", "SmallCNN", "BatchNorm", "MLP", "GELU"],
)
def test_threads_change_no_bit(make, side, threads):
    """Ten steps of every group, and where it ends; every thread has a network of its own."""
    torch.manual_seed(0)
    oracle, groups = groups_of(make(), side)

    def train(group):
        w, batch, buffers = (x.clone() if isinstance(x, torch.Tensor) else x for x in group)
        losses, _ = oracle.descend(
            w, [StepBlock.of(batch, w.dtype)] * 10, Step(0.1, 0.999), buffers
        )
        return w, losses, buffers

    expected = [train(group) for group in groups]
    before = {k: v.clone() for k, v in oracle.runner.network.state_dict().items()}
    pool = ClientThreads(threads)
    oracle.allocate_replicas(threads)
    try:
        for _ in range(3):
            for one, other in zip(pool.map(train, groups), expected, strict=True):
                assert all(map(torch.equal, one, other))
    finally:
        pool.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("client")] == []
    assert all(torch.equal(v, before[k]) for k, v in oracle.runner.network.state_dict().items())


def test_an_error_in_a_thread_is_raised():
    pool = ClientThreads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            list(pool.map(lambda n: 1 // n, [1, 0, 1]))
    finally:
        pool.close()


def test_a_single_group_runs_in_the_thread_that_asks():
    pool = ClientThreads(2)
    try:
        (name,) = pool.map(lambda _: threading.current_thread().name, [0])
        names = set(pool.map(lambda _: threading.current_thread().name, [0, 1, 2]))
    finally:
        pool.close()
    assert name == threading.current_thread().name
    assert all(name.startswith("client") for name in names)


def fit(root, make, threads, network, precision=None):
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        data = DigitsDataModule(None, Sizes([90, 80, 70, 60, 50, 40, 30, 20]))
        method = run(make(network()), data, 3, root=root, precision=precision, clients_per_round=5)
        assert torch.get_num_threads() == threads and method.groups.threads.count == 1
    finally:
        torch.set_num_threads(1)
    return method


RUNS = {
    "SmallCNN": (FedSLR, lambda: SmallCNN(width=4)),
    "MLP": (FedSLR, lambda: MLP(64, (8,))),
    "CNN": (FedSLR, lambda: CNN(image_size=8)),
    "BatchNorm": (FedSLR, batchnorm),
    "dropout": (FedSLR, dropout),
    "GELU": (FedSLR, gelu),
    "FedAvg": (FedAvg, lambda: MLP(64, (8,))),
    "FedAvg with dropout": (FedAvg, dropout),
    "FedProx": (FedProx, lambda: MLP(64, (8,))),
    "FedProx with BatchNorm": (FedProx, batchnorm),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "network"), RUNS.values(), ids=RUNS)
def test_a_run_ends_where_it_ends_with_one_thread(tmp_path, kind, network):
    """Up to the rounding of sums over groups; and the logged losses too."""
    one, two = (fit(tmp_path, kind, threads, network) for threads in (1, 2))
    torch.testing.assert_close(two.global_model, one.global_model, rtol=0, atol=1e-5)
    assert two.row.keys() == one.row.keys()
    for name, value in one.row.items():
        assert two.row[name] == pytest.approx(value, rel=1e-3, nan_ok=True), name


@pytest.mark.parametrize("network", [lambda: MLP(64, (8,)), lambda: SmallCNN(width=4), gelu])
def test_threads_agree_in_16_bits(tmp_path, network):
    """Where a chain's own layers, which are written for one precision, do not run."""
    one, two = (fit(tmp_path, FedAvg, threads, network, "bf16-mixed") for threads in (1, 2))
    torch.testing.assert_close(two.global_model, one.global_model, rtol=0, atol=1e-3)


def test_two_runs_with_threads_are_equal_bit_for_bit(tmp_path):
    ends = [fit(tmp_path, FedSLR, 2, lambda: SmallCNN(width=4)) for _ in range(2)]
    assert torch.equal(*(end.global_model for end in ends))
    assert ends[0].row == ends[1].row


@pytest.mark.parametrize(
    ("network", "groups"),
    [
        # Steps of a small model take no longer than waiting for the interpreter's lock.
        (lambda: MLP(64, (8,)), [5]),
        # Shared out evenly; then as many as a cache of GROUP_FLOATS holds: two, and one.
        (lambda: MLP(64, (GROUP_FLOATS // 8 // 64,)), [2, 3]),
        (lambda: MLP(64, (GROUP_FLOATS // 2 // 80,)), [1, 2, 2]),
        (lambda: MLP(64, (GROUP_FLOATS // 64,)), [1] * 5),
        (lambda: SmallCNN(width=4), [1] * 5),  # one client after another in any case
    ],
    ids=["small", "medium", "large", "very large", "convolutions"],
)
def test_a_chunk_is_cut_into_groups_by_model_size(tmp_path, network, groups):
    sizes = []

    class Watched(FedAvg):
        def client_update(self, clients, w):
            sizes.append(len(clients))
            return super().client_update(clients, w)

    fit(tmp_path, Watched, 2, network)
    assert sorted(sizes) == sorted(groups * 3)


def test_a_small_model_s_local_sgd_uses_threads(tmp_path, monkeypatch):
    """Where no step needs the interpreter, the clients of a group are shared out again; where all
    steps need it, one thread takes them."""
    seen = set()
    descend = Oracle.descend

    def watched(self, w, *args):
        seen.add((threading.current_thread().name.partition("_")[0], len(w)))
        return descend(self, w, *args)

    monkeypatch.setattr(Oracle, "descend", watched)
    method = fit(tmp_path, FedAvg, 2, lambda: MLP(64, (8,)))
    expected = {("MainThread", 5)}
    if method.oracle.engine.releases_gil():
        expected = {("client", 3), ("client", 2)}
    assert seen == expected
