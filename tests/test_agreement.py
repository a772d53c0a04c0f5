"""The problem that other implementations are compared on, against NumPy."""

import re
from collections import Counter

import numpy as np

from benchmarks import published
from benchmarks.agreement import lora, ours
from benchmarks.agreement import run as agreement
from benchmarks.agreement.problem import (
    BODY,
    CLASSES,
    COHORTS,
    EPOCHS,
    FEATURES,
    HIDDEN,
    RATE,
    SIZES,
    Problem,
)
from pfl.algorithms import FedAvg
from tests.commands import ROOT


def gradient(w, x, y):
    """Of the mean cross entropy of V tanh(W x + b) + c at w = (W, b, V, c)."""
    cut = HIDDEN * FEATURES
    first, b = w[:cut].reshape(HIDDEN, FEATURES), w[cut:BODY]
    head, c = w[BODY:-CLASSES].reshape(CLASSES, HIDDEN), w[-CLASSES:]
    hidden = np.tanh(x @ first.T + b)
    scores = np.exp(hidden @ head.T + c)
    error = (scores / scores.sum(1, keepdims=True) - np.eye(CLASSES)[y]) / len(y)
    back = error @ head * (1 - hidden**2)
    return np.concatenate(
        [(back.T @ x).ravel(), back.sum(0), (error.T @ hidden).ravel(), error.sum(0)]
    )


def test_our_side_takes_the_steps_that_the_others_are_given(tmp_path):
    """FedAvg by its formula, on the mini-batches of the file that drivers read."""
    ours.problem().save(tmp_path / "problem.npz")
    problem = Problem.load(tmp_path / "problem.npz")
    w, expected = problem.start, []
    for now, cohort in enumerate(COHORTS):
        models = []
        for i in cohort:
            v = w.copy()
            for epoch in range(EPOCHS):
                for x, y in problem.batches("train", now, i, epoch):
                    v -= RATE * gradient(v, x, y)
            models.append(v)
        w = np.average(models, axis=0, weights=[SIZES[i] for i in cohort])
        expected.append(w)
    np.testing.assert_allclose(ours.run(FedAvg)["w"], expected, rtol=0, atol=1e-12)
    assert np.abs(np.diff(expected, axis=0)).max() > 0.01


def test_lora_is_the_same_network_on_both_sides():
    """FedAvg of A, B and the head, from the local steps of the network that drivers train."""
    problem, server, rows = ours.problem(), lora.Network(), []
    for now, cohort in enumerate(COHORTS):
        client, sent = lora.Network(), []
        for i in cohort:
            client.load_state_dict(server.state_dict())
            client.train_on(problem, now, i)
            sent.append({name: value.clone() for name, value in client.state_dict().items()})
        shares = [SIZES[i] / sum(SIZES[k] for k in cohort) for i in cohort]
        mean = {n: sum(p * s[n] for p, s in zip(shares, sent, strict=True)) for n in sent[0]}
        server.load_state_dict(mean)
        rows.append(server.row())
    actual, expected = ours.run_lora(FedAvg), lora.stacked(rows)
    for name in ("A", "B", "head", "update"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=0, atol=1e-12)
    assert np.abs(expected["update"][0]).max() > 0.01


def test_the_rows_of_the_page_are_those_of_the_file():
    """Every row is there with the whole version of which the page prints the first digits."""
    rows = published.rows("agreement")
    page = agreement.PAGE.read_text()
    tables = [text for _, text in re.findall(agreement.TABLE, page, re.S)]
    lines = [line for line in "\n".join(tables).splitlines() if line.startswith("|")]
    lines = [line for line in lines if not line.startswith(("|---", "| method |"))]
    assert len(rows) == len(lines) == 156
    for row, line in zip(rows, lines, strict=True):
        cells = [*row.values()][3:]
        assert f"| {' | '.join(cells)} |" == line
    for row in rows:
        assert f"`{row['project']}`" in page
        assert f"`{row['version'][:8]}`.\n" in page


def test_readme_counts_the_rows_of_each_project():
    line = next(
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith("| [iterates compared]")
    )
    counts = Counter(row["project"] for row in published.rows("agreement"))
    names = ("TsingZ0/PFLlib", "apple/pfl-research", "google/fedjax")
    assert re.findall(r"(\d+) rows", line) == [str(counts[name]) for name in names]
