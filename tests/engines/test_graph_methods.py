"""Every method on recorded steps: a run's numbers are those of the sequential engine."""

import warnings

import numpy as np
import pytest
import torch

from pfl.algorithms import FedAvg
from pfl.engines import graph
from pfl.engines.graph import GraphEngine
from tests.algorithms.methods import METHODS, normalized_network, small_network, small_world
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


def assert_equal_runs(root, name, make_network, **loop):
    """A method's runs with the sequential engine and on recorded steps end alike."""
    ends = []
    for engine in ("sequential", "auto"):
        torch.manual_seed(0)
        method = METHODS[name].make(make_network(), lr=0.2, batch_size=2, engine=engine)
        data = small_world(classes=METHODS[name].classes)
        run(method, data, 3, root=root / engine, clients_at_once=3, **loop)
        ends.append(method)
    assert isinstance(ends[1].oracle.engine, GraphEngine)
    torch.testing.assert_close(*map(values, ends), rtol=1e-9, atol=1e-11)
    assert ends[1].row == pytest.approx(ends[0].row, rel=1e-9, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_the_numbers_of_the_sequential_engine(tmp_path, recorder, name):
    assert_equal_runs(tmp_path, name, small_network, evaluate=())


@pytest.mark.parametrize("name", ["FedAvg", "FedBN", "SCAFFOLD", "FedCLUP"])
def test_runs_with_batch_norm(tmp_path, recorder, name):
    """Steps with as many samples for every client are recorded, and their statistics travel."""
    assert_equal_runs(tmp_path, name, normalized_network)
    assert recorder.count > 1


def test_where_one_client_does_not_fit_steps_are_no_longer_recorded(tmp_path, recorder):
    class Short(FedAvg):
        """Has no memory for recordings after the first round."""

        def client_update(self, clients, w):
            sent = super().client_update(clients, w)
            if clients.round and isinstance(self.oracle.engine, GraphEngine):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return sent

    ends = []
    for kind, engine in ((FedAvg, "sequential"), (Short, "auto")):
        torch.manual_seed(0)
        method = kind(small_network(), lr=0.2, batch_size=2, engine=engine)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run(method, small_world(), 3, root=tmp_path / engine, evaluate=())
        ends.append(method)
    said = [str(one.message) for one in seen if "does not hold" in str(one.message)]
    name = ends[1].oracle.engine.name
    assert not isinstance(ends[1].oracle.engine, GraphEngine)
    assert said[-1].endswith(f"the run continues with the engine {name}, which records no steps")
    torch.testing.assert_close(ends[1].global_model, ends[0].global_model, rtol=0, atol=1e-12)
