"""The plain loop with several clients at the same time: the same numbers, bit for bit."""

import copy
import threading

import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, Dirichlet
from models import LeNet5, LogisticRegression, SmallCNN
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedAvg
from pfl.oracle import Batch, Oracle, default_loss
from pfl.parameters import ParameterSpace


def batchnorm():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 10))


def dropout():
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))


def oracle_of(network, side, engine="loop"):
    space = ParameterSpace(network)
    oracle = Oracle(network, space, default_loss, engine)
    rng = torch.Generator().manual_seed(0)
    counts = [5, 5, 4, 2, 1]
    inputs = torch.randn(5, 5, 1, side, side, generator=rng)
    batch = Batch(inputs, torch.randint(10, (5, 5), generator=rng), counts)
    oracle.inspect(inputs[0, :2], batch.targets[0, :2])
    w = space.vector.detach().repeat(6, 1)
    return oracle, w + 0.1 * torch.randn(w.shape, generator=rng), batch


def gradient(oracle, w, batch):
    buffers = None
    if oracle.buffers.size:
        buffers = torch.linspace(0.5, 1.5, oracle.buffers.size).repeat(len(w), 1)
    return [*oracle.gradient(w, batch, buffers), *([] if buffers is None else [buffers])]


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize(
    ("make", "side"), [(LeNet5, 28), (SmallCNN, 8), (batchnorm, 8)], ids=["LeNet5", "CNN", "BN"]
)
def test_threads_change_no_bit(make, side, threads):
    torch.manual_seed(0)
    oracle, w, batch = oracle_of(make(), side)
    wanted = gradient(oracle, w, batch)
    before = copy.deepcopy(oracle.network.state_dict())
    oracle.share_out(threads)
    assert len(oracle._networks) == threads
    try:
        for _ in range(3):
            for one, other in zip(gradient(oracle, w, batch), wanted, strict=True):
                assert torch.equal(one, other)
    finally:
        oracle.share_out(1)
    assert len(oracle._networks) == 1
    assert [t.name for t in threading.enumerate() if t.name.startswith("client")] == []
    assert before.keys() == oracle.network.state_dict().keys()


def test_an_error_in_a_thread_is_raised():
    oracle, w, batch = oracle_of(SmallCNN(), 8)
    oracle.share_out(2)
    try:
        wrong = Batch(batch.inputs[..., :1, :1], batch.targets, batch.counts)
        with pytest.raises(RuntimeError):
            oracle.gradient(w, wrong)
    finally:
        oracle.share_out(1)


@pytest.mark.parametrize(("make", "engine"), [(dropout, "loop"), (LogisticRegression, "vmap")])
def test_others_stay_with_one_thread(make, engine):
    network = make() if make is dropout else make(64)
    oracle, _, _ = oracle_of(network, 8, engine)
    oracle.share_out(4)
    assert len(oracle._networks) == 1 and oracle._pool is None


def test_a_run_uses_the_threads_it_finds_and_leaves_them(tmp_path):
    ends = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            torch.manual_seed(0)
            method = FedAvg(SmallCNN(width=4), batch_size=64)
            trainer = Trainer(
                max_epochs=2,
                accelerator="cpu",
                default_root_dir=tmp_path,
                enable_progress_bar=False,
                enable_checkpointing=False,
            )
            data = DigitsDataModule(5, Dirichlet(1.0))
            trainer.fit(method, datamodule=FederatedLoop(data, clients_per_round=3))
            assert torch.get_num_threads() == threads and method.oracle._pool is None
        finally:
            torch.set_num_threads(1)
        ends.append(method.global_model.clone())
    assert torch.equal(*ends)
