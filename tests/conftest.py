"""Settings and fixtures of all tests."""

import os

# Before torch is imported, and so that processes which tests start inherit it: the tests run in
# one process per core, where a second thread only slows them down. W&B needs no network.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"

import functools
import gc
import multiprocessing.util

import pytest
import torch
import torch.fx.traceback
from lightning.fabric.utilities import registry

from pfl.files import write_figure
from tests.commands import elsewhere
from tests.forks import spawnv_passfds

torch.set_num_threads(1)
# Each Trainer searches all installed packages for callbacks, which takes as long as a small run.
registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[assignment]
# It looks for NVIDIA's library each time, eight times in a run.
torch.cuda.device_count = functools.cache(torch.cuda.device_count)
# With anomaly detection, which the engine `debug` turns on, PyTorch writes down Python's stack at
# every operation: a quarter of the time of a test. No test reads the stack.
torch.fx.traceback.format_stack = lambda: ["a stack"]
multiprocessing.util.spawnv_passfds = spawnv_passfds
LARGE = (
    "ResNet18",
    "VGG11",
    "AlexNet",
    "GoogLeNet",
    "DenseNet121",
    "TorchVision",
    "Timm",
)  # networks that take a second or more, in parametrized tests


def pytest_collection_modifyitems(items):
    """Marks the cases of large networks as slow."""
    for item in items:
        if any(name in item.name for name in LARGE):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Keeps what was imported out of the garbage collector's search, which each run begins with."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """Lets the modules go at the end, or some of torch's would complain."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def quick_run_figures():
    """Makes the figures of runs empty files: drawing one takes longer than a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pfl.callbacks.run_figures.write_figure", lambda path, figure: path.touch())
        yield


@pytest.fixture(scope="module")
def run_figures():
    """Draws the figures of runs, in tests that read them or whose runs others do not have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pfl.callbacks.run_figures.write_figure", write_figure)
        yield


@pytest.fixture
def here(tmp_path):
    """An empty current folder, in which a test must leave nothing."""
    folder = tmp_path / "here"
    folder.mkdir()
    with elsewhere(folder):
        yield folder


@pytest.fixture
def threads():
    """Says how many threads PyTorch has, which a run takes for its clients."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def quick_figures(monkeypatch):
    """Makes the figures of a test's comparisons empty files: drawing them takes seconds."""
    monkeypatch.setattr("pfl.experiments.results.write_figure", lambda path, figure: path.touch())
