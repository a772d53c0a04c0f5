"""The styles and words of curves: no two in a plot look alike, and each says what it is."""

import numpy as np
import pytest

from benchmarks import redraw
from pfl.errors import ConfigError
from pfl.report.curves import figure_of, read_panel

ROUNDS = range(1, 4)


def table(runs, **axes):
    """Returns the rows of runs at one point of a grid; y is its number plus the round."""
    return [
        {"run": run, "seed": 0, "diverged": 0, **axes, "round": k, "m": float(number + k)}
        for number, run in enumerate(runs)
        for k in ROUNDS
    ]


def look(curve):
    return curve.colour, curve.line, curve.marker


def drawn(panels, rows, runs, grid=None):
    read = [read_panel("figure", panel, list(runs), grid or {}) for panel in panels]
    return figure_of("title", read, rows)


def test_twenty_four_runs_have_twenty_four_styles():
    runs = [f"run {number}" for number in range(24)]
    figure = drawn([{"y": "m"}], table(runs), runs)
    assert len({look(curve) for curve in figure.plots[0].marks}) == 24


def test_the_axis_names_all_metrics_that_a_curve_may_show():
    """Neither curve has `other`, which a figure of other runs may show."""
    figure = drawn([{"y": ["other", "m"]}], table(["A", "B"]), ["A", "B"])
    assert figure.plots[0].ylabel == "other or\nm"


def test_runs_have_colours_and_points_of_a_grid_lines():
    rows = [row for a in (1, 2) for row in table(["A", "B"], step_size=a)]
    (plot,) = drawn([{"y": "m"}], rows, ["A", "B"], {"step_size": [1, 2]}).plots
    found = {curve.label: curve for curve in plot.marks}
    assert [*found] == ["A, step size 1", "A, step size 2", "B, step size 1", "B, step size 2"]
    assert found["A, step size 1"].colour == found["A, step size 2"].colour
    assert found["A, step size 1"].line == found["B, step size 1"].line
    assert len({look(curve) for curve in plot.marks}) == 4


def test_a_run_alone_has_a_colour_for_each_point_and_panels_with_other_points_their_legends():
    axes = {"model.rate": [0.1, 0.2, 0.3], "kind": ["deep", "flat"]}
    rows = []
    for rate in axes["model.rate"]:
        for kind in axes["kind"]:
            rows += table(["A"], **{"model.rate": rate, "kind": kind})
    panels = [
        {"y": "m", "where": {"kind": "deep"}},
        {"y": "m", "where": {"model.rate": 0.1}},
    ]
    figure = drawn(panels, rows, ["A"], axes)
    labels = [[curve.label for curve in plot.marks] for plot in figure.plots]
    assert labels == [["rate 0.1", "rate 0.2", "rate 0.3"], ["deep", "flat"]]
    assert len({curve.colour for curve in figure.plots[0].marks}) == 3
    assert figure.legend == "" and all(plot.legend for plot in figure.plots)
    # the same lines in both panels have one legend
    figure = drawn(panels[:1] * 2, rows, ["A"], axes)
    assert figure.legend == "below" and not any(plot.legend for plot in figure.plots)


def test_differences_to_a_run_are_taken_seed_by_seed():
    rows = []
    for seed, gap in ((0, 1.0), (1, 5.0)):
        for k in ROUNDS:
            place = {"seed": seed, "diverged": 0, "round": k}
            rows.append({"run": "base", **place, "m": 10.0 * seed + k})
            rows.append({"run": "A", **place, "m": 10.0 * seed + k + gap})
    panel = read_panel("figure", {"y": "m", "runs": ["A"], "minus": "base"}, ["base", "A"], {})
    (line,) = panel.lines(rows)
    np.testing.assert_allclose(line.y, [3.0] * 3)  # the mean of 1 and 5
    np.testing.assert_allclose([line.low, line.high], [[1.0] * 3, [5.0] * 3])
    assert panel.shows("base", {})  # its runs are made
    with pytest.raises(ConfigError, match="minus: 'C'; it must be one of base, A"):
        read_panel("figure", {"y": "m", "minus": "C"}, ["base", "A"], {})


@pytest.mark.parametrize(
    "name", ["fedslr-theory", "fedpd-floor", "fedslr-digits", "fedagg-dynamics"]
)
def test_no_style_is_twice_in_a_published_figure(name):
    figure = redraw.figure(*redraw.files()[name])
    for plot in figure.plots:
        assert len({look(curve) for curve in plot.marks}) == len(plot.marks)


def test_the_figure_of_fedslr_shows_its_closest_rival():
    figure = redraw.figure(*redraw.files()["fedslr-digits"])
    personalized = figure.plots[1]
    assert "FedPer" in {curve.label for curve in personalized.marks}
