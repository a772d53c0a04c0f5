"""What the benchmarks give to other frameworks."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.task import Task


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 1, 2), (0, 6)])
def test_a_task_comes_back_from_its_file(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    order = np.random.default_rng(0).permutation(6)
    owned = np.split(order, np.cumsum(sizes)[:-1])
    task = Task(
        key="W1",
        network="LogisticRegression",
        arguments={"in_features": 4},
        epochs=2,
        batch=3,
        rate=0.5,
        inputs=np.arange(24, dtype=np.float32).reshape(6, 1, 2, 2),
        targets=np.arange(6),
        owned=owned,
        cohorts=np.array([[0, 1], [1, 0]]),
        weights=[np.ones((10, 4), np.float32), np.zeros(10, np.float32)],
    )

    task.save(tmp_path / "task.npz")
    loaded = Task.load(tmp_path / "task.npz")

    assert [len(own) for own in loaded.owned] == list(sizes)
    assert [own.tolist() for own in loaded.owned] == [own.tolist() for own in owned]
    assert [w.shape for w in loaded.weights] == [(10, 4), (10,)]
    assert np.array_equal(loaded.inputs, task.inputs)
    assert np.array_equal(loaded.cohorts, task.cohorts)
    assert (loaded.arguments, loaded.epochs, loaded.batch) == ({"in_features": 4}, 2, 3)
