"""Figures as papers with two columns of text take them."""

import re

import numpy as np
import pytest

from pfl.experiments.results import save_for_paper
from pfl.report.plots import Curve, Figure, Plot


@pytest.mark.parametrize(
    ("columns", "size", "expected"),
    [
        (1, (4.6, 4.4), (3.25, 3.25 * 4.4 / 4.6)),  # one of the two columns
        (2, (8.6, 4.1), (6.75, 6.75 * 4.1 / 8.6)),  # both
        (1, (6.5, 2.0), (6.75, 6.75 * 2.0 / 6.5)),
    ],
)
def test_a_figure_has_the_width_and_font_of_a_paper(columns, size, expected, tmp_path):
    line = np.arange(3.0)
    plots = [Plot([Curve("A", line, line)], title="score") for _ in range(columns)]
    path = save_for_paper(Figure(plots, size, columns), tmp_path / "curves")
    assert path == tmp_path / "paper-curves.pdf"
    content = path.read_bytes()
    box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", content)
    points = [float(number) for number in box.groups()]
    np.testing.assert_allclose(points, [72 * inches for inches in expected])
    assert b"STIXGeneral" in content and b"/Type3" not in content
