"""What the tests of the methods share."""

from functools import partial

import pytest

from pfl.callbacks.run_figures import CollaborationMap
from tests.algorithms.methods import BATCHES, small_network, small_world
from tests.algorithms.traced import START, TRACE, unlike
from tests.problems import History, run


@pytest.fixture(autouse=True)
def no_figure(monkeypatch):
    """Leaves out the figure of who learned from whom, which takes longer than a small run."""
    monkeypatch.setattr(CollaborationMap, "on_fit_end", lambda *_: None)


@pytest.fixture
def problem():
    """Four unlike clients; a file whose methods need others has a fixture of the same name."""
    return unlike()


@pytest.fixture
def fit(tmp_path):
    """`tests.problems.run`, with a folder of its own."""
    return partial(run, root=tmp_path)


@pytest.fixture
def watch(fit):
    """`fit`, perhaps from other models of the clients; what there was after each round."""

    def watch(method, data, rounds, *, start=None, callbacks=(), **loop):
        history = History(start)
        fit(method, data, rounds, callbacks=[history, *callbacks], **loop)
        return history

    return watch


@pytest.fixture
def follow(watch, problem):
    """Trains a method on the problem from START over TRACE; what there was after each round."""

    def follow(kind, *, trace=TRACE, callbacks=(), loop=None, **arguments):
        method, seen = kind(problem.network(START), **arguments), dict(callbacks=callbacks)
        return watch(method, problem, len(trace), trace=trace, **seen, **(loop or {}))

    return follow


@pytest.fixture
def train_small(fit):
    """Trains a method on the small world without evaluation; the algorithm."""

    def train(method, rounds, *, settings=BATCHES, data=None, arguments=(), network=None, **loop):
        algorithm = method.make(network or small_network(), **dict(arguments) | settings)
        data = data or small_world(classes=method.classes)
        return fit(algorithm, data, rounds, evaluate=(), **loop)

    return train
