"""The file of every client's scores by round."""

import numpy as np

from pfl.report.client_scores import NAME, ClientScoresByRound, append


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
