"""Panels of `reproduce`: their lines and points."""

import numpy as np
import pytest

from pfl.report.curves import read_panel


def rows(run, seed, values, diverged=False, **axes):
    """Returns rows of rounds 1, 2, ... with values of `m`, and `samples` 10, 20, ..."""
    place = {"run": run, "seed": seed, "diverged": 0, **axes}
    result = [{**place, "round": k, "m": v, "samples": 10 * k} for k, v in enumerate(values, 1)]
    return result + [{**place, "diverged": 1, "round": len(values) + 1}] * diverged


def lines(panel, content, runs=("a", "b"), grid=None):
    return read_panel("figure", panel, list(runs), grid or {}).lines(content)


def test_a_line_is_the_mean_over_the_seeds_and_ends_where_one_diverged():
    content = rows("a", 0, [4.0, 2.0, 1.0]) + rows("a", 1, [2.0, 1.0], diverged=True)
    (line,) = lines({"y": "m", "x": "samples", "x_unit": 5, "y_unit": 2}, content)
    np.testing.assert_allclose(line.x, [2, 4])
    np.testing.assert_allclose(line.y, [1.5, 0.75])
    np.testing.assert_allclose(line.low, [1, 0.5])
    np.testing.assert_allclose(line.high, [2, 1])


def test_panels_choose_runs_points_and_the_first_metric_that_a_run_has():
    content = rows("a", 0, [1.0], k=1) + rows("a", 0, [2.0], k=2)
    content += [{"run": "b", "seed": 0, "diverged": 0, "k": 2, "round": 1, "other": 5.0}]
    panel = {"y": ["m", "other"], "runs": ["b", "a"], "where": {"k": 2}}
    actual = lines(panel, content, grid={"k": [1, 2]})
    assert [(line.label, line.point, line.y.tolist()) for line in actual] == [
        ("b", {"k": 2}, [5.0]),
        ("a", {"k": 2}, [2.0]),
    ]


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ("last", {1: 3.0, 2: 2.0}),
        ("best", {1: 2.0, 2: 2.0}),
        ({"m": 2.5}, {1: 2.0, 2: 2.0}),
        ({"m": 2.0}, {1: 2.0, 2: 2.0}),
        ({"m": 1.9}, {}),  # never reached
    ],
)
def test_a_point_of_the_grid_is_one_round_of_its_run(at, expected):
    content = rows("a", 0, [4.0, 2.0, 3.0], k=1) + rows("a", 0, [4.0, 3.0, 2.0], k=2)
    content += rows("a", 0, [4.0], diverged=True, k=3)
    drawn = lines({"y": "m", "x": "k", "at": at}, content, grid={"k": [1, 2, 3]})
    actual = {x: y for line in drawn for x, y in zip(line.x.tolist(), line.y.tolist(), strict=True)}
    assert actual == expected


def test_rounds_and_samples_until_a_threshold():
    content = rows("a", 0, [4.0, 2.0, 1.0], k=1) + rows("a", 1, [1.0], k=1)
    panel = {"y": "samples", "x": "k", "at": {"m": 1.0}}
    (line,) = lines(panel, content, grid={"k": [1]})
    assert (line.x, line.y, line.low, line.high) == ([1], [20], [10], [30])  # rounds 3 and 1
    # one seed that does not get there: no point
    content += rows("a", 2, [4.0], k=1)
    assert lines(panel, content, grid={"k": [1]}) == []
