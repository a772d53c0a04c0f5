"""Tables of `pfl compare --latex` and figures compile in two-column papers, and fit their columns."""

import re
import shutil
import subprocess

import numpy as np
import pytest

from pfl.experiments.results import NARROW, save_for_paper
from pfl.report import comparison_tables as tables
from pfl.report.comparison import ComparedRuns
from pfl.report.plots import Curve, Figure, Plot
from pfl.report.table import latex
from tests.report.test_comparison import run

CLASSES = {  # of papers with two columns
    "article": r"\documentclass[twocolumn]{article}",
    "IEEEtran": r"\documentclass[conference]{IEEEtran}",
    "acmart": r"\documentclass[sigconf,nonacm]{acmart}",
}
PAPER = r"""%s
\usepackage{booktabs,graphicx}
\begin{document}
\title{A paper}
\maketitle
See Table~\ref{tab:comparison}.
\input{paper}
\begin{figure}\includegraphics{paper-one}\caption{One column.}\end{figure}
\begin{figure*}\includegraphics{paper-two}\caption{Both columns.}\end{figure*}
\clearpage
\end{document}
"""
OVERFULL = re.compile(r"Overfull \\hbox \(([\d.]+)pt")


def has(name):
    """Whether this machine's TeX has a file."""
    if shutil.which("pdflatex") is None:
        return False
    return subprocess.run(["kpsewhich", name], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("words", [["percent", "score", "worst"], ["score", "gradients", "worst"]])
@pytest.mark.parametrize("places", [["Digits"], ["Fashion-MNIST", "CIFAR-10"]])
def test_a_table_and_figures_fit_a_paper(kind, words, places, tmp_path):
    """Nothing of the paper is wider than its column by more than a point; there is no warning."""
    if not (has(f"{kind}.cls") and has("booktabs.sty")):
        pytest.skip(f"there is no LaTeX with {kind} and booktabs here")
    seeds = {"FedAvg": [0.5, 0.52], "FedAvg + fine-tuning": [0.7, 0.74], "FedSLR": [0.8, 0.7]}
    points = [
        ComparedRuns(
            [run(label, seed, [x]) for label, xs in seeds.items() for seed, x in enumerate(xs)],
            "FedAvg",
            title=place,
        )
        for place in places
    ]
    table = tables.paper_table(points, words)
    text = latex(table, wide=len(table.columns) > 1 + NARROW)
    (tmp_path / "paper.tex").write_text(text)
    plots = [Plot([Curve("A", np.arange(3.0), np.arange(3.0))], title="score")] * 2
    save_for_paper(Figure(plots[:1], (4.6, 4.4), 1), tmp_path / "one")
    save_for_paper(Figure(plots, (8.6, 4.1), 2), tmp_path / "two")
    (tmp_path / "main.tex").write_text(PAPER % CLASSES[kind])
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "main.tex"]
    for _ in range(2):  # the second one knows the references
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:]
    assert [width for width in OVERFULL.findall(done.stdout) if float(width) > 1] == []
    assert "undefined" not in done.stdout and "Missing character" not in done.stdout
