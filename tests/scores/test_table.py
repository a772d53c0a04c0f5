"""The file of every client's scores by round."""

import io

import numpy as np
import pandas
import pytest

from pfl import files
from pfl.scores import table
from pfl.scores.table import CLIENTS, ScoreTable, append_scores
from tests.refusal import refused

SPLITS = {"train": 0.25, "val": 0.5, "test": 0.75}


def written(folder, rounds=(2, 4, 6)):
    for number in rounds:
        scores = {"test/global/loss": np.array([1.0, np.nan, 3.0]) / number}
        append_scores(
            folder / CLIENTS, number, scores | {"test/global/accuracy": np.full(3, number / 8)}
        )
    return ScoreTable.read(folder)


def test_scores_on_training_samples_are_read(tmp_path):
    """`loop.evaluate: [train, test]` writes them beside the others."""
    append_scores(
        tmp_path / CLIENTS,
        1,
        {f"{split}/finetuned/5/loss": np.full(2, value) for split, value in SPLITS.items()},
    )
    scores = ScoreTable.read(tmp_path)
    assert [str(name) for name in scores.names] == [f"{split}/finetuned/5/loss" for split in SPLITS]
    assert scores.of(1, "train/finetuned/5/loss").tolist() == [0.25, 0.25]
    assert scores.over_rounds("train/finetuned/5/loss")["mean"].tolist() == [0.25]


def test_what_is_written_is_read(tmp_path):
    scores = written(tmp_path)
    assert scores.rounds.tolist() == [2, 4, 6]
    np.testing.assert_array_equal(scores.of(4, "test/global/loss"), [0.25, np.nan, 0.75])
    np.testing.assert_array_equal(scores.of(6, "test/global/accuracy"), [0.75] * 3)
    assert scores.of(3, "test/global/loss") is None and scores.of(4, "other") is None
    assert ScoreTable.read(tmp_path / "elsewhere") is None


def test_half_a_record_is_left_out(tmp_path):
    written(tmp_path)
    path = tmp_path / CLIENTS
    path.write_bytes(path.read_bytes()[:-5])  # the file was cut short
    assert ScoreTable.read(tmp_path).rounds.tolist() == [2, 4]


def test_a_column_that_is_missing_is_nan_and_a_new_one_is_left_out(tmp_path):
    written(tmp_path)
    append_scores(
        tmp_path / CLIENTS, 8, {"test/global/loss": np.ones(3), "test/unseen/0/loss": np.ones(3)}
    )
    scores = ScoreTable.read(tmp_path)
    assert np.isnan(scores.of(8, "test/global/accuracy")).all()
    np.testing.assert_array_equal(scores.of(8, "test/global/loss"), np.ones(3))
    assert scores.of(8, "test/unseen/0/loss") is None


def test_the_distribution_over_clients_by_round(tmp_path):
    """Eleven accuracies k/10 times 1/round, one client without: the worst two are 0 and 0.1."""
    values = np.append(np.arange(11) / 10, np.nan)
    for number in (1, 2):
        append_scores(tmp_path / CLIENTS, number, {"test/global/accuracy": values / number})
    numbers = ScoreTable.read(tmp_path).over_rounds("test/global/accuracy")
    for name, expected in {"q50": 0.5, "q10": 0.1, "worst10": 0.05, "best10": 0.95}.items():
        np.testing.assert_allclose(numbers[name], [expected, expected / 2], rtol=1e-6)
    np.testing.assert_allclose(numbers["jain"], 5.5**2 / (11 * 3.85), rtol=1e-6)
    with refused("client_scores.name", "'other'", "test/global/accuracy"):
        ScoreTable.read(tmp_path).over_rounds("other")


def test_the_worst_of_a_metric_are_the_largest_where_small_is_good(tmp_path):
    scores = {"test/global/error": np.array([0.1, 0.4]), "test/global/other": np.zeros(2)}
    append_scores(tmp_path / CLIENTS, 1, scores)
    read, metrics = ScoreTable.read(tmp_path), {"error": False, "other": None}
    np.testing.assert_allclose(read.over_rounds("test/global/error", metrics)["worst10"], [0.4])
    assert "worst10" not in read.over_rounds("test/global/other", metrics)


def test_of_many_clients_percentiles_are_kept(tmp_path, monkeypatch):
    """Of 0, 1, ..., 2000 the percentile p is 20 p."""
    monkeypatch.setattr(table, "MOST_CLIENTS", 1000)
    values = np.random.default_rng(0).permutation(2001).astype(float)
    nobody = np.full(2001, np.nan)
    append_scores(
        tmp_path / CLIENTS, 1, {"test/global/loss": values, "test/global/accuracy": nobody}
    )
    scores = ScoreTable.read(tmp_path)
    assert scores.percentiles and len(scores.rows) == 101
    np.testing.assert_allclose(scores.values("test/global/loss")[0], 20 * np.arange(101))
    assert scores.over_rounds("test/global/loss")["q25"] == [500]
    assert scores.over_rounds("test/global/accuracy") == {}
    assert scores.of(1, "test/global/loss") is None  # nobody's own score is known


@pytest.mark.parametrize(("clients", "rows"), [(10_000, 10_000), (10_001, 101)])
def test_many_clients_are_more_than_ten_thousand(tmp_path, clients, rows):
    append_scores(tmp_path / CLIENTS, 1, {"test/global/loss": np.zeros(clients)})
    scores = ScoreTable.read(tmp_path)
    assert len(scores.rows) == rows
    assert scores.percentiles is (clients > 10_000)


def test_an_evaluation_without_scores_leaves_no_file(tmp_path):
    append_scores(tmp_path / CLIENTS, 1, {})
    assert ScoreTable.read(tmp_path) is None


def test_a_table_without_rows_has_no_rounds(tmp_path):
    """As of a process that was killed before it counted its first rows."""
    written(tmp_path, rounds=(2,))
    table.write_scores(tmp_path / CLIENTS, ScoreTable.read(tmp_path).rows[:0])
    scores = ScoreTable.read(tmp_path)
    assert scores.rounds.tolist() == []
    assert scores.of(2, "test/global/loss") is None


def test_a_file_of_another_program_is_refused(tmp_path):
    np.save(tmp_path / CLIENTS, np.zeros(3))
    with refused(CLIENTS, "not written by this program"):
        ScoreTable.read(tmp_path)


def test_a_data_frame_and_numpy_read_the_file(tmp_path):
    """A row for each client and evaluation: a loss of 1, NaN, 3 over 2, then over 4."""
    written(tmp_path, rounds=(2, 4))
    frame = pandas.DataFrame(np.load(tmp_path / CLIENTS))
    assert list(frame) == ["round", "client", "test/global/loss", "test/global/accuracy"]
    assert (
        frame["round"].tolist() == [2] * 3 + [4] * 3 and frame["client"].tolist() == [0, 1, 2] * 2
    )
    np.testing.assert_array_equal(frame["test/global/loss"], [0.5, np.nan, 1.5, 0.25, np.nan, 0.75])


def test_rows_of_a_process_that_was_killed_do_not_count(tmp_path):
    """The header counts the rows, and is written after them: what follows them is overwritten."""
    written(tmp_path)
    path = tmp_path / CLIENTS
    whole = path.read_bytes()
    path.write_bytes(whole + b"rows that no header counts")
    assert ScoreTable.read(tmp_path).rounds.tolist() == [2, 4, 6]
    append_scores(path, 8, {"test/global/loss": np.ones(3)})
    again = ScoreTable.read(tmp_path)
    assert again.rounds.tolist() == [2, 4, 6, 8] and len(path.read_bytes()) == len(whole) + 3 * 16
    np.testing.assert_array_equal(again.of(8, "test/global/loss"), np.ones(3))


def test_the_header_keeps_its_size(tmp_path):
    """From 1 to 10^9 rows; a restored table is compared after it."""
    written(tmp_path)
    content = (tmp_path / CLIENTS).read_bytes()
    skip = table.header_size(content)
    assert len(content) - skip == 3 * 3 * 16
    kind, sizes = ScoreTable.read(tmp_path).rows.dtype, set()
    for count in (1, 10**9):
        file = io.BytesIO()
        table._write_header(file, count, kind)
        sizes.add(file.tell())
    assert sizes == {skip}


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    written(tmp_path)
    before = (tmp_path / CLIENTS).read_bytes()

    def full(file, content):
        file.write(content[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_all", full)
    with refused(str(tmp_path / CLIENTS), "No space left"):
        append_scores(tmp_path / CLIENTS, 8, {"test/global/loss": np.ones(3)})
    assert (tmp_path / CLIENTS).read_bytes() == before


def test_a_run_of_version_0_1_is_refused(tmp_path):
    (tmp_path / "client_scores.json").write_text("{}")
    with refused(str(tmp_path), "version 0.1", "run it again"):
        ScoreTable.read(tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / CLIENTS).write_bytes(b"nothing of NumPy's")
    with refused(str(tmp_path / CLIENTS), "damaged"):
        ScoreTable.read(tmp_path)
