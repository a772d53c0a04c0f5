"""How many clients are trained at once where memory is short."""

from typing import ClassVar

import numpy as np
import pytest
import torch

from models import MLP
from pfl.algorithms import FedAgg, FedSLR
from pfl.batch import Batch, default_loss
from pfl.memory import SHARE, clients_that_fit
from pfl.oracle import Oracle
from pfl.parameters import ParameterSpace
from tests.problems import least_squares, run


def short_of(limit, kind):
    """A method whose clients find memory for `limit` of them, and notice late that it ends."""

    class Short(kind):
        asked: ClassVar[list[int]] = []

        def client_update(self, clients, w):
            self.asked.append(len(clients))
            sent = super().client_update(clients, w)
            if len(clients) > limit:
                for values in clients.state.values():
                    values.fill_(torch.nan)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return sent

    return Short


@pytest.mark.parametrize("kind", [FedSLR, FedAgg])
def test_fewer_clients_at_a_time_end_where_all_of_them_do(tmp_path, kind):
    """7 clients, of whom 2 fit: 7, then its halves 4 and 3 (the 3 is never tried: 4 fails first),
    then 2 at a time, which is remembered for the rounds that follow."""
    problem = least_squares((7, 2, 5, 3, 4, 6, 8))
    arguments = dict(lr=0.05, batch_size=2, local_epochs=2)
    wanted = run(kind(problem.network(np.zeros(6)), **arguments), problem, 3, root=tmp_path)
    Short = short_of(2, kind)
    with pytest.warns(UserWarning, match="does not hold") as notices:
        found = run(Short(problem.network(np.zeros(6)), **arguments), problem, 3, root=tmp_path)
    assert [str(n.message) for n in notices if "does not hold" in str(n.message)] == [
        f"The memory of cpu does not hold {n} clients at a time; going on with {m}"
        for n, m in ((7, 4), (4, 2))
    ]
    assert Short.asked[:2] == [7, 4] and set(Short.asked[2:]) <= {1, 2, 3}
    torch.testing.assert_close(found.global_model, wanted.global_model, rtol=0, atol=1e-12)
    for name in wanted.store.names:
        everyone = np.arange(7)
        rows = (x.store.read(name, everyone) for x in (found, wanted))
        torch.testing.assert_close(*rows, rtol=0, atol=1e-12)
    # What the failed attempts had booked is gone.
    for one, other in zip(*(x.trainer.recorder.rows for x in (found, wanted)), strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_a_single_client_that_does_not_fit_ends_the_run(tmp_path):
    problem = least_squares((7, 2, 5, 3, 4, 6, 8))
    method = short_of(0, FedSLR)(problem.network(np.zeros(6)))
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning, match="does not hold"):
        run(method, problem, 3, root=tmp_path)


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
    assert clients_that_fit(oracle, batch, 5) == int(SHARE * 1_060_000 / each)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5_000)
    assert clients_that_fit(oracle, batch, 5) == 1
