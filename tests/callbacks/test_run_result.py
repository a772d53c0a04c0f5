"""The result of a run: the best round, gains over the local baseline, memory, versions."""

import sys
from importlib import metadata

import numpy as np
import pytest
import torch

import pfl
from pfl.callbacks.run_result import (
    against_local,
    distributions,
    gains_over_local,
    peak_memory,
    versions,
)
from pfl.scores.names import ScoreName
from pfl.scores.runs import best_round

NAN = float("nan")
NAMES = [(k, n) for k in ("global", "personalized") for n in ("accuracy", "loss")]
VAL = {f"{k[0]}{n[0]}": f"val/{k}/{n}" for k, n in NAMES}


@pytest.mark.parametrize(
    "values, best, by",
    [
        ({"ga": [0.1, 0.5, 0.3]}, 2, "ga"),
        ({"ga": [0.1, 0.5, 0.5]}, 2, "ga"),  # the first of equal rounds
        ({"ga": [0.9, 0.5, 0.3], "pa": [0.1, 0.2, 0.3]}, 3, "pa"),
        ({"ga": [0.9, 0.5, 0.3], "pl": [3.0, 2.0, 1.0]}, 1, "ga"),
        ({"gl": [0.2, 0.1, 0.3]}, 2, "gl"),
        ({"gl": [0.1, 0.2, 0.3], "pl": [0.3, 0.2, 0.4]}, 2, "pl"),
        ({"ga": [None, 0.2, None]}, 2, "ga"),  # not evaluated in every round
        ({"ga": [NAN, 0.1, NAN]}, 2, "ga"),
        ({"ga": [NAN, NAN, NAN], "gl": [3.0, 2.0, 1.0]}, 3, "gl"),
    ],
)
def test_validation_selects_the_best_round(values, best, by):
    rows = [
        {"round": r + 1, **{VAL[k]: v[r] for k, v in values.items() if v[r] is not None}}
        for r in range(3)
    ]
    result = best_round(rows)
    assert result.pop("selected_by") == VAL[by]
    assert result is not rows[best - 1] and result == rows[best - 1]


def test_test_scores_never_select():
    assert best_round([{"round": 1, "test/global/accuracy": 0.9}]) is None
    assert best_round([]) is None


def named(columns):
    """Columns by the names of their scores."""
    return {ScoreName.read(name): values for name, values in columns.items()}


def test_compare_counts_gains_over_the_local_baseline():
    columns = {
        "test/local/accuracy": np.array([0.5, 0.5, 0.5, 0.5, np.nan]),
        "test/local/loss": np.array([1.0, 1.0, 1.0, 1.0, np.nan]),
        "test/global/accuracy": np.array([0.0, 0.0, 0.0, 0.0, np.nan]),
        "test/personalized/accuracy": np.array([0.7, 0.6, 0.5, 0.4, np.nan]),
    }
    result = against_local(named(columns), {})
    assert (result["gained"], result["equal"], result["lost"]) == (0.5, 0.25, 0.25)
    assert result["test/local/accuracy"] == 0.5 and result["test/local/accuracy_std"] == 0.0
    del columns["test/personalized/accuracy"]
    result = against_local(named(columns), {})
    assert (result["gained"], result["equal"], result["lost"]) == (0.0, 0.0, 1.0)
    untested = {name: np.full(5, np.nan) for name in columns}
    assert against_local(named(untested), {}) == {}
    del columns["test/local/accuracy"], columns["test/local/loss"]
    assert against_local(named(columns), {}) == {}


def test_compare_takes_a_lower_loss_as_a_gain():
    columns = {
        "test/local/accuracy": np.full(4, np.nan),
        "test/local/loss": np.array([1.0, 2.0, 3.0, 10.0]),
        "test/global/loss": np.array([0.5, 2.0, 4.0, 5.0]),
        "test/global/accuracy": np.full(4, np.nan),
    }
    result = against_local(named(columns), {})
    assert (result["gained"], result["equal"], result["lost"]) == (0.5, 0.25, 0.25)
    assert (result["test/local/loss"], result["test/local/loss_worst10"]) == (4.0, 10.0)
    assert "test/local/accuracy" not in result


def test_the_baseline_has_metrics_too_and_all_are_distributions():
    """An error of 0.1, 0.2 and 0.6, whose worst is the highest; one client has none."""
    local = {"accuracy": [0.5, 0.4, 0.3, 0.2], "loss": [1.0] * 4, "error": [0.1, 0.2, 0.6, NAN]}
    columns = {f"test/local/{name}": np.array(values) for name, values in local.items()}
    columns["test/global/accuracy"] = np.array([0.7, 0.4, 0.2, 0.4])
    result = against_local(named(columns), {"error": False})
    mean, worst = result["test/local/error"], result["test/local/error_worst10"]
    assert mean == pytest.approx(0.3) and worst == 0.6
    assert "test/local/loss" not in result
    np.testing.assert_allclose(gains_over_local(named(columns)), [0.2, 0, -0.1, 0.2], atol=1e-12)
    numbers = distributions(named(columns), {"error": False})
    assert numbers.keys() == {*columns, "gain"}
    assert numbers["test/local/error"]["best10"] == pytest.approx(0.1)
    assert numbers["gain"]["mean"] == pytest.approx(0.3 / 4)
    # |differences| of 0.2, 0, -0.1, 0.2: 0.2, 0.3, 0, 0.1, 0.2, 0.3, each twice; over 2 16 0.075.
    assert numbers["gain"]["gini"] == pytest.approx(2.2 / (2 * 16 * 0.075))
    assert numbers["gain"]["jain"] == pytest.approx(0.3**2 / (4 * 0.09))


def test_peak_memory_is_in_bytes_and_versions_are_the_installed_ones():
    assert 1e7 < peak_memory() < 1e12
    assert versions()["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert versions()["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_checkout_that_is_not_installed_has_a_version(monkeypatch):
    """Its packages are found by PYTHONPATH, and there is no metadata of ours."""
    read = metadata.version

    def without_ours(name):
        if name == "lightning-pfl":
            raise metadata.PackageNotFoundError(name)
        return read(name)

    monkeypatch.setattr(metadata, "version", without_ours)
    assert versions.__wrapped__()["lightning-pfl"] == pfl.__version__ == versions()["lightning-pfl"]


def test_the_gain_is_that_of_the_model_that_counts():
    """After fine-tuning a client gains 0.2 and not 0.1, unless `select_by` names another model."""
    columns = {"test/local/accuracy": 0.5, "test/global/accuracy": 0.6}
    columns["test/finetuned/5/accuracy"] = 0.7
    scores = named({name: np.array([value]) for name, value in columns.items()})
    np.testing.assert_allclose(gains_over_local(scores), [0.2])
    np.testing.assert_allclose(gains_over_local(scores, select_by="global/accuracy"), [0.1])
