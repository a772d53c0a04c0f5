"""How many clients are trained at once where memory is short, and what evaluations keep."""

import copy
import gc
import warnings
import weakref
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch

from datamodules import DigitsDataModule, SharedTest, SplitOwn
from models import MLP
from pfl import FederatedLoop
from pfl.aggregation.privacy import SamplePrivacy
from pfl.algorithms import FedAgg, FedAvg, FedCLUP, FedSLR
from pfl.clients import Clients, LocalSchedule
from pfl.engines.batch import Batch, default_loss
from pfl.engines.memory import clients_that_fit
from pfl.engines.oracle import Oracle
from pfl.method import set_up
from pfl.parameters import ParameterSpace
from pfl.scores.evaluation import ClientScores
from pfl.stages.private import GRADIENTS
from tests.problems import least_squares, quiet, run

SCRIPTED = """The following operation failed in the TorchScript interpreter.
RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB."""  # of the type that it has there
ERRORS = {
    "plain": partial(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB."),
    "scripted": partial(RuntimeError, SCRIPTED),
}
CPU = torch.device("cpu")
SIZES = (7, 2, 5, 3, 4, 6, 8)


def short_of(limit, kind, error="plain"):
    """A method whose clients find memory for `limit` of them, and notice late that it ends."""

    class Short(kind):
        asked: ClassVar[list[int]] = []

        def client_update(self, clients, w):
            self.asked.append(len(clients))
            sent = super().client_update(clients, w)
            if len(clients) > limit:
                for values in clients.state.values():
                    values.fill_(torch.nan)
                raise ERRORS[error]()
            return sent

    return Short


def assert_noticed(seen, doing):
    """Of 7 clients at a time, and then of 4, that there is no memory."""
    assert [str(n.message) for n in seen if "does not hold" in str(n.message)] == [
        f"The memory of cpu does not hold {n} clients at a time in {doing}; "
        f"the run continues with {m}"
        for n, m in ((7, 4), (4, 2))
    ]


def check_equal(actual, expected):
    torch.testing.assert_close(actual.global_model, expected.global_model, rtol=0, atol=1e-12)
    for name in expected.store.names:
        everyone = np.arange(7)
        rows = (x.store.read(name, everyone) for x in (actual, expected))
        torch.testing.assert_close(*rows, rtol=0, atol=1e-12)
    # What the failed attempts had booked is gone.
    for one, other in zip(*(x.trainer.recorder.rows for x in (actual, expected)), strict=True):
        assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", [FedSLR, FedAgg])
def test_fewer_clients_at_a_time_end_where_all_of_them_do(tmp_path, kind, error):
    """7 clients, of whom 2 fit: 7, then its halves 4 and 3 (the 3 is never tried: 4 fails first),
    then 2 at a time, which is remembered for the rounds that follow."""
    problem = least_squares(SIZES)
    arguments = dict(lr=0.05, batch_size=2, local_epochs=2)
    expected = run(kind(problem.network(), **arguments), problem, 3, root=tmp_path)
    Short = short_of(2, kind, error)
    with pytest.warns(UserWarning, match="does not hold") as seen:
        actual = run(Short(problem.network(), **arguments), problem, 3, root=tmp_path)
    assert_noticed(seen, "training")
    assert Short.asked[:2] == [7, 4] and set(Short.asked[2:]) <= {1, 2, 3}
    check_equal(actual, expected)


def test_gradients_of_a_failed_attempt_are_no_private_ones(tmp_path):
    """They reached nobody: those of the next attempt have the same noise, and are counted once."""
    problem = least_squares(SIZES)
    privacy = SamplePrivacy(clip=1.0, noise_multiplier=1.0, delta=0.01, reproducible=True)
    arguments = dict(lr=0.05, batch_size=2, local_epochs=2)
    ends = []
    for kind in (FedAvg, short_of(2, FedAvg)):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not hold")
            method = kind(problem.network(), **arguments)
            ends.append(run(method, problem, 3, root=tmp_path, sample_privacy=privacy))
    check_equal(*ends[::-1])
    steps = [2 * 3 * -(-size // 2) for size in SIZES]
    assert ends[1].client_rows(GRADIENTS, np.arange(7))[:, 0].tolist() == steps


def test_fewer_models_at_a_time_have_the_same_scores(tmp_path):
    """7 personalized models, of which 3 fit: 7, 4, then 2 at a time; training is not concerned."""

    class Short(FedSLR):
        asked: ClassVar[list[int]] = []

        def personalized(self, clients):
            self.asked.append(len(clients))
            if len(clients) > 3:
                raise ERRORS["plain"]()
            return super().personalized(clients)

    network, data = MLP(64, (4,)), DigitsDataModule(7)
    methods = [kind(copy.deepcopy(network), lr=0.05) for kind in (FedSLR, Short)]
    expected = run(methods[0], data, 2, root=tmp_path)
    with pytest.warns(UserWarning, match="does not hold") as seen:
        actual = run(methods[1], data, 2, root=tmp_path)
    assert_noticed(seen, "evaluation")
    assert actual.asked[:2] == [7, 4] and set(actual.asked[2:]) <= {1, 2}
    assert "test/personalized/loss" in actual.row
    check_equal(actual, expected)


def test_a_failed_attempt_keeps_no_memory(tmp_path):
    """When the next one begins: neither what it made, nor the models that the network had last."""
    problem, references = least_squares(SIZES), []
    method = run(FedSLR(problem.network(), engine="sequential"), problem, 1, root=tmp_path)

    def work(clients):
        assert not references or references[0]() is None
        rows = np.zeros((len(clients), 6))
        references.append(weakref.ref(rows))
        method.oracle.gradient(torch.from_numpy(rows), next(clients.batches(LocalSchedule(2))))
        if len(clients) > 4:
            raise ERRORS["plain"]()

    loop, by_size = method.trainer.datamodule, np.array([6, 0, 5, 2, 4, 3, 1])
    assert (np.diff(loop.datamodule.client_sizes[by_size]) <= 0).all()
    clients = Clients(by_size, 0, loop.client_data(CPU), dtype=torch.float64)
    with pytest.warns(UserWarning, match="does not hold"):
        groups = [len(group) for group, _ in method.groups.run(clients, work, 7)]
    assert groups == [4, 3]


def test_a_single_client_that_does_not_fit_ends_the_run(tmp_path):
    problem = least_squares(SIZES)
    method = short_of(0, FedSLR)(problem.network())
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning, match="does not hold"):
        run(method, problem, 3, root=tmp_path)


def test_other_errors_are_not_taken_for_it(tmp_path):
    problem = least_squares(SIZES)

    class Wrong(FedSLR):
        def client_update(self, clients, w):
            raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run(Wrong(problem.network()), problem, 3, root=tmp_path)


def test_all_processes_have_chunks_of_one_size(tmp_path, monkeypatch):
    """The smallest that one of them finds memory for."""
    monkeypatch.setattr(set_up, "gather", lambda own: [own, 3])
    problem = least_squares(SIZES)
    method = run(FedSLR(problem.network()), problem, 1, root=tmp_path, evaluate=())
    assert method.trainer.datamodule.chunk_size == 3


def test_a_loop_is_used_for_networks_of_different_size(tmp_path):
    loop = FederatedLoop(DigitsDataModule(4), evaluate=())
    for width in (4, 40):
        method = FedSLR(MLP(64, (width,)))
        quiet(tmp_path, 1, limit_val_batches=0).fit(method, loop)
        assert loop.chunk_size == set_up.CHUNK_FLOATS // (65 * width + (width + 1) * 10)


def test_as_many_clients_as_the_free_memory_holds(monkeypatch):
    """Per client 1000 bytes of a step (2000 for two), its batch and 5 vectors; free: what the GPU
    has and what PyTorch keeps for itself."""
    network = MLP(4, (3,), 2)
    space = ParameterSpace(network)
    oracle = Oracle(network, space, default_loss)
    batch = Batch(torch.zeros(1, 6, 4), torch.zeros(1, 6, dtype=torch.int64), [6])
    oracle.inspect(batch.inputs[0], batch.targets[0])
    figures = {
        "reset_peak_memory_stats": None,
        "memory_allocated": 5_000,
        "max_memory_allocated": 7_000,
        "memory_reserved": 65_000,
        "mem_get_info": (1_000_000, 2_000_000),
    }
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    P = 4 * 3 + 3 + 3 * 2 + 2
    each = 1000 + 6 * 4 * 4 + 6 * 8 + 5 * 4 * P
    assert clients_that_fit(oracle, batch, 5, 0.6) == int(0.6 * 1_060_000 / each)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5_000)
    assert clients_that_fit(oracle, batch, 5, 0.6) == 1


# ---- evaluations --------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [SplitOwn(0.3, 0.2), SharedTest(0.2)], ids=repr)
def test_evaluations_take_no_more_memory_round_by_round(tmp_path, protocol):
    """Metrics refer to themselves: nothing but a collection of garbage gives back theirs."""
    data = DigitsDataModule(6, protocol=protocol)
    gc.collect()
    gc.disable()
    try:
        before = sum(type(thing) is ClientScores for thing in gc.get_objects())
        run(FedCLUP(MLP(64, [4])), data, 3, root=tmp_path)
        after = sum(type(thing) is ClientScores for thing in gc.get_objects())
    finally:
        gc.enable()
    assert after - before == 4  # of two splits and two kinds of model
