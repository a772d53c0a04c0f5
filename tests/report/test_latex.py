"""Tables of `pfl compare --latex` and figures compile in two-column papers, and fit there."""

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
NEEDED = {  # beside the class
    "article": [],
    "IEEEtran": ["ptmr7t.tfm"],
    "acmart": ["libertine.sty", "zi4.sty", "newtxmath.sty"],
}
PAPER = r"""%s
\usepackage{booktabs,graphicx}
\begin{document}
\title{A paper}
\maketitle
\input{paper}
\begin{figure}\includegraphics[width=\linewidth]{paper-one}\caption{One column.}\end{figure}
\begin{figure*}\includegraphics[width=\linewidth]{paper-two}\caption{Both columns.}\end{figure*}
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
@pytest.mark.parametrize(
    ("words", "places"),
    [
        (["score"], ["Digits"]),
        (["percent", "score", "worst"], ["Fashion-MNIST", "CIFAR-10"]),
        (["score", "worst", "gradients", "MB up"], ["Fashion-MNIST", "CIFAR-10", "Shakespeare"]),
    ],
)
def test_a_table_and_figures_fit_a_paper(kind, words, places, tmp_path):
    """Nothing of the paper is wider than its column by more than a point; there is no warning."""
    for name in (f"{kind}.cls", "booktabs.sty", *NEEDED[kind]):
        if not has(name):
            pytest.skip(f"this machine has no LaTeX with {name}")
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
    text = latex(table, wide=len(table.columns) > 1 + NARROW, fits=True)
    (tmp_path / "paper.tex").write_text(text)
    plots = [Plot([Curve("A", np.arange(3.0), np.arange(3.0))], title="score")] * 2
    save_for_paper(Figure(plots[:1], (4.6, 4.4), 1), tmp_path / "one")
    save_for_paper(Figure(plots, (8.6, 4.1), 2), tmp_path / "two")
    (tmp_path / "main.tex").write_text(PAPER % CLASSES[kind])
    command = ["pdflatex", "-draftmode", "-interaction=nonstopmode", "-halt-on-error", "main.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert [width for width in OVERFULL.findall(done.stdout) if float(width) > 1] == []
    assert "Missing character" not in done.stdout


def test_a_table_is_printed_smaller_where_it_is_too_wide():
    """By graphicx; TeX knows the width of the column only when it sets the page."""
    table = tables.paper_table([ComparedRuns([run("A", 0, [0.5])], "A")], ["score"])
    lines = latex(table, fits=True).splitlines()
    place = lines.index(r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%")
    assert lines[place + 1].startswith(r"\begin{tabular}")
    assert lines[lines.index(r"\end{tabular}") + 1] == "}"
