"""The file of every client's scores by round."""

import numpy as np

from pfl.report import client_scores
from pfl.report.client_scores import NAME, ClientScoresByRound, append
from tests.refusal import refused


def written(folder, rounds=(2, 4, 6)):
    for number in rounds:
        scores = {"test_global_loss": np.array([1.0, np.nan, 3.0]) / number}
        append(folder, number, scores | {"test_global_accuracy": np.full(3, number / 8)})
    return ClientScoresByRound.read(folder)


def test_what_is_written_is_read(tmp_path):
    scores = written(tmp_path)
    assert scores.rounds.tolist() == [2, 4, 6]
    np.testing.assert_array_equal(scores.of(4, "test_global_loss"), [0.25, np.nan, 0.75])
    np.testing.assert_array_equal(scores.of(6, "test_global_accuracy"), [0.75] * 3)
    assert scores.of(3, "test_global_loss") is None and scores.of(4, "other") is None
    assert ClientScoresByRound.read(tmp_path / "elsewhere") is None


def test_half_a_record_is_left_out(tmp_path):
    written(tmp_path)
    path = tmp_path / f"{NAME}.bin"
    path.write_bytes(path.read_bytes()[:-5])  # killed while the last record was written
    assert ClientScoresByRound.read(tmp_path).rounds.tolist() == [2, 4]


def test_a_column_that_is_missing_is_nan_and_a_new_one_is_left_out(tmp_path):
    written(tmp_path)
    append(tmp_path, 8, {"test_global_loss": np.ones(3), "test_unseen_loss": np.ones(3)})
    scores = ClientScoresByRound.read(tmp_path)
    assert np.isnan(scores.of(8, "test_global_accuracy")).all()
    np.testing.assert_array_equal(scores.of(8, "test_global_loss"), np.ones(3))
    assert scores.of(8, "test_unseen_loss") is None


def test_the_distribution_over_clients_by_round(tmp_path):
    """Eleven accuracies k/10 times 1/round, one client without: the worst two are 0 and 0.1."""
    values = np.append(np.arange(11) / 10, np.nan)
    for number in (1, 2):
        append(tmp_path, number, {"test_global_accuracy": values / number})
    numbers = ClientScoresByRound.read(tmp_path).over_rounds("test_global_accuracy")
    for name, expected in {"q50": 0.5, "q10": 0.1, "worst10": 0.05, "best10": 0.95}.items():
        np.testing.assert_allclose(numbers[name], [expected, expected / 2], rtol=1e-6)
    np.testing.assert_allclose(numbers["jain"], 5.5**2 / (11 * 3.85), rtol=1e-6)
    with refused("client_scores.column", "'other'", "test_global_accuracy"):
        ClientScoresByRound.read(tmp_path).over_rounds("other")


def test_the_worst_of_a_metric_are_the_largest_where_small_is_good(tmp_path):
    scores = {"test_global_error": np.array([0.1, 0.4]), "test_global_other": np.zeros(2)}
    append(tmp_path, 1, scores, {"error": False, "other": None})
    read = ClientScoresByRound.read(tmp_path)
    np.testing.assert_allclose(read.over_rounds("test_global_error")["worst10"], [0.4])
    assert "worst10" not in read.over_rounds("test_global_other")


def test_of_many_clients_percentiles_are_kept(tmp_path, monkeypatch):
    """Of 0, 1, ..., 2000 the percentile p is 20 p."""
    monkeypatch.setattr(client_scores, "MOST_CLIENTS", 1000)
    values = np.random.default_rng(0).permutation(2001).astype(float)
    nobody = np.full(2001, np.nan)
    append(tmp_path, 1, {"test_global_loss": values, "test_global_accuracy": nobody})
    scores = ClientScoresByRound.read(tmp_path)
    assert scores.percentiles and scores.values.shape == (1, 2, 101)
    np.testing.assert_allclose(scores.values[0, 0], 20 * np.arange(101))
    assert scores.over_rounds("test_global_loss")["q25"] == [500]
    assert scores.over_rounds("test_global_accuracy") == {}
    assert scores.of(1, "test_global_loss") is None  # nobody's own score is known
