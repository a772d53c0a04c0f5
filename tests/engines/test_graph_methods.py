"""Every method on recorded steps: a run's numbers are those of the sequential engine."""

import numpy as np
import pytest
import torch

from pfl.engines import graph
from pfl.engines.graph import GraphEngine
from tests.algorithms.methods import METHODS, small_network, small_world
from tests.problems import run
from tests.recorder import Recorder


@pytest.fixture
def recorder(monkeypatch):
    """CPUs can record, as GPUs do, and runs take the first engine that is right: a recorded one."""
    recorder = Recorder()
    monkeypatch.setitem(graph.RECORDERS, "cpu", recorder)
    torch.use_deterministic_algorithms(True)
    yield recorder
    torch.use_deterministic_algorithms(False)


def values(method):
    """The global model, and what each of four clients remembers."""
    states = {name: method.store.read(name, np.arange(4)) for name in method.store.names}
    return {**{f"client {name}": rows for name, rows in states.items()}, "w": method.global_model}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_the_numbers_of_the_sequential_engine(tmp_path, recorder, name):
    ends = []
    for engine in ("sequential", "auto"):
        torch.manual_seed(0)
        method = METHODS[name].make(small_network(), lr=0.2, batch_size=2, engine=engine)
        data = small_world(classes=METHODS[name].classes)
        run(method, data, 3, root=tmp_path / engine, evaluate=(), clients_at_once=3)
        ends.append(method)
    assert isinstance(ends[1].oracle.engine, GraphEngine)
    torch.testing.assert_close(*map(values, ends), rtol=1e-9, atol=1e-11)
    assert ends[1].row == pytest.approx(ends[0].row, rel=1e-9, nan_ok=True)
