"""Both drawers show what is in a figure: matplotlib in a picture, and Plotly on a page."""

import numpy as np
import pytest
from matplotlib.cbook import is_math_text

from pfl.report import matplotlib_drawer, plotly_drawer
from pfl.report.figures import client_plot, round_plot, size_plot
from pfl.report.plots import Bars, Curve, Figure, Guide, HeatMap, Plot, Spread, Words

X = np.array([1.0, 2.0])


def both(*marks, **about):
    """The axes of matplotlib and the figure of Plotly for a plot of some marks."""
    figure = Figure([Plot(marks, **about)], size=(5, 4))
    (axes, *_) = matplotlib_drawer.draw(figure).axes
    return axes, plotly_drawer.draw(figure)


def test_a_curve_has_its_points_its_band_and_its_words():
    curve = Curve("A & B", X, 3 * X, 2 * X, 4 * X, colour="#009E73", line="--", marker="D")
    axes, page = both(curve, xlabel="round", ylabel="score")
    (line,) = axes.lines
    assert (line.get_xydata().tolist(), line.get_label()) == ([[1, 3], [2, 6]], "A & B")
    assert (line.get_linestyle(), line.get_marker()) == ("--", "D")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "score")
    low, high, drawn = page.data
    assert [list(trace.y) for trace in page.data] == [[2, 4], [4, 8], [3, 6]]
    assert low.fill is None and high.fill == "tonexty"
    # 009E73 is 0, 158 and 115 in decimal numbers.
    assert high.fillcolor == "rgba(0, 158, 115, 0.15)"
    assert (drawn.name, drawn.line.dash, drawn.marker.symbol) == ("A &amp; B", "dash", "diamond")
    assert page.layout.xaxis.title.text == "round" and page.layout.height == 400
    borders = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (borders.min(), borders.max()) == (2, 8)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rounds_and_clients_have_whole_numbers(count):
    """Of few, matplotlib writes 0.5 and 1.2, too."""
    rows = [{"round": k, "test/global/accuracy": k / 4} for k in range(1, count + 1)]
    scores = np.arange(count) / 4
    plots = [round_plot(rows), client_plot({"global": scores}, "accuracy")]
    plots.append(size_plot(np.arange(count), 4 * scores, "#009E73"))
    for axes in matplotlib_drawer.draw(Figure(plots, size=(12, 4), columns=3)).axes:
        numbers = axes.get_xticks()
        assert len(numbers) and (numbers == numbers.round()).all()


@pytest.mark.parametrize(("count", "marker"), [(1, "o"), (2, "none")])
def test_one_round_is_a_point(count, marker):
    names = ("test/global/accuracy", "test/global/accuracy_worst10")
    rows = [{"round": k, **dict.fromkeys(names, 0.5)} for k in range(count)]
    (axes,) = matplotlib_drawer.draw(Figure([round_plot(rows)], size=(5, 4))).axes
    assert [line.get_marker() for line in axes.lines] == [marker, marker]


def test_a_band_without_width_is_not_drawn():
    axes, page = both(Curve("A", X, X, X, X, marker="o"))
    assert not axes.collections and len(page.data) == 1


def test_points_without_a_line_say_what_they_are():
    curve = Curve("A", X, X, line="", marker="^", texts=["one\n1 < 2", "two"])
    axes, page = both(curve)
    assert (axes.lines[0].get_linestyle(), axes.lines[0].get_marker()) == ("None", "^")
    (drawn,) = page.data
    assert list(drawn.text) == ["<b>one</b><br>1 &lt; 2", "<b>two</b>"]
    assert (drawn.mode, drawn.marker.symbol) == ("markers", "triangle-up")


def test_a_page_shows_the_first_choice_of_its_curves():
    axes = {"rounds": X, "bytes": 10 * X}
    curves = [
        Curve(choice, X, X, marker="o", choice=choice, x_by_axis=axes) for choice in ("loss", "f1")
    ]
    _, page = both(*curves)
    assert [trace.visible for trace in page.data] == [True, False]
    expected = {"score": "f1", "x": {"rounds": [1, 2], "bytes": [10, 20]}}
    assert page.data[1].meta == expected


@pytest.mark.parametrize("name", ["$5^$", "$0-$50K", "one $", "none"])
def test_a_name_from_the_data_is_no_formula(name, tmp_path):
    """Of "$0-$50K" matplotlib would show the formula 0-, and "$5^$" is an error as a formula."""
    heat = HeatMap(np.eye(2), "samples", [name, "b"], ["c", name])
    drawn = matplotlib_drawer.draw(Figure([Plot([heat])], size=(5, 4)))
    drawn.savefig(tmp_path / "a.png")
    for axis in (drawn.axes[0].xaxis, drawn.axes[0].yaxis):
        (shown,) = [one for one in axis.get_ticklabels() if one.get_text() not in "bc"]
        assert not is_math_text(shown.get_text())
        assert shown.get_text().replace(r"\$", "$") == name


def test_a_heat_map_has_its_numbers_and_names():
    """Of twelve clients with numbers eleven have room beside the picture; words all stand there."""
    values = np.arange(24.0).reshape(2, 12)
    heat = HeatMap(values, "samples", ["<cat>", "dog"], [str(number) for number in range(12)])
    axes, page = both(heat)
    np.testing.assert_array_equal(axes.images[0].get_array(), values)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["<cat>", "dog"]
    assert len(axes.get_xticks()) == 11
    np.testing.assert_array_equal(page.data[0].z, values)
    assert list(page.data[0].y) == ["&lt;cat&gt;", "dog"] and len(page.data[0].x) == 12


def test_bars_and_distributions_have_their_values():
    axes, page = both(Bars(X, 5 * X, "#000000"))
    assert [bar.get_height() for bar in axes.patches] == list(page.data[0].y) == [5, 10]
    axes, page = both(*(Spread(name, X, "#000000") for name in "AB"))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["A", "B"]
    assert [(trace.name, list(trace.y)) for trace in page.data] == [("A", [1, 2]), ("B", [1, 2])]


@pytest.mark.parametrize("mark", [Guide("0", "#000000", 1), Words("here", 0, 0)])
def test_marks_that_only_pictures_have(mark):
    figure = Figure([Plot([mark])], size=(5, 4))
    (axes,) = matplotlib_drawer.draw(figure).axes
    assert len(axes.lines) + len(axes.texts) == 1
    with pytest.raises(NotImplementedError, match=type(mark).__name__):
        plotly_drawer.draw(figure)


def test_plots_stand_in_rows_with_one_legend():
    """Three plots in rows of two leave a place, which stays empty; a label is named once."""
    plots = [Plot([Curve("A", X, X)], title=title, log="y") for title in "abc"]
    drawn = matplotlib_drawer.draw(Figure(plots, (6, 6), 2, "All", legend="below"))
    assert [axes.get_title() for axes in drawn.axes] == ["a", "b", "c", ""]
    assert not drawn.axes[3].axison and drawn.axes[0].get_yscale() == "log"
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == ["A"]
    assert drawn.get_suptitle() == "All"
