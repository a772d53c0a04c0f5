"""Splits of a client's samples in the order of a column, with splits that are written by hand."""

import numpy as np
import pytest

from datamodules import ConfigError, Natural, SplitOwn, TableDataModule

INPUT = "x,y,site,day\n"


def of(tmp_path, rows, **options):
    """The data of a file with the columns x, y, site and day."""
    file = tmp_path / "series.csv"
    file.write_text(INPUT + "".join(f"{row}\n" for row in rows))
    given = {"feature_columns": ["x"], "partition": Natural(), "client_column": "site"}
    given["protocol"] = SplitOwn(test=0.25, validation=0.25, order="day")
    return TableDataModule(file, "y", **{**given, **options})


def parts(data, client):
    return [arrays[client].tolist() for arrays in data.partition.splits.values()]


def test_the_last_samples_of_each_client_are_tested(tmp_path):
    # A's days 9, 10, 1, 30 are the rows 0, 2, 4, 6: as numbers 1 < 9 < 10 < 30, as text not.
    days = [9, 4, 10, 3, 1, 2, 30, 1]
    rows = [f"{i},{i % 2},{'AB'[i % 2]},{day}" for i, day in enumerate(days)]
    data = of(tmp_path, rows)
    assert parts(data, 0) == [[0, 4], [2], [6]]
    assert parts(data, 1) == [[5, 7], [3], [1]]  # days 1, 2 | 3 | 4
    words = "each client is tested on 25% of its own samples, validated on 25% of its own"
    assert data.protocol.describe() == f"{words}, the last by day"
    assert repr(data.protocol) == "SplitOwn(test=0.25, validation=0.25, order='day')"


@pytest.mark.parametrize(
    "days",
    [
        ["2024-02-01", "2023-12-31", "2024-01-31T23:59", "2024-01-31"],
        ["2024-01-31T23:59Z", "2024-01-31T00:00+02:00", "2024-01-31T23:00Z", "2024-01-31T12:00Z"],
    ],
)
def test_dates_are_points_in_time(days, tmp_path):
    data = of(tmp_path, [f"{i},{i % 2},A,{day}" for i, day in enumerate(days)])
    assert parts(data, 0) == [[1, 3], [2], [0]]


def test_equal_values_keep_the_order_of_the_file(tmp_path):
    data = of(tmp_path, [f"{i},{i % 2},A,7" for i in range(8)])
    assert parts(data, 0) == [[0, 1, 2, 3], [4, 5], [6, 7]]


def test_dates_of_parquet(tmp_path):
    import datetime

    import pyarrow as pa
    from pyarrow import parquet

    days = [datetime.date(2024, 2, 1), datetime.date(2023, 1, 1), datetime.date(2024, 1, 1)]
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"x": [1.0, 2.0, 3.0], "y": [0, 1, 0], "day": days}), file)
    protocol = SplitOwn(test=0.34, validation=0.0, order="day")
    data = TableDataModule(file, "y", ["x"], num_clients=1, protocol=protocol)
    assert parts(data, 0) == [[1, 2], [], [0]]


@pytest.mark.parametrize(
    ("days", "said"),
    [
        (["01/02/2024"] * 4, "the column 'day' holds '01/02/2024'; it must hold numbers, or dates"),
        (
            ["3", "", "4", "5"],
            "the column 'day' has no value; it must have one in each row (row 2 after the names",
        ),
        (["3", "inf", "4", "5"], "without missing or infinite values"),
    ],
)
def test_what_has_no_order_is_refused(days, said, tmp_path):
    data = of(tmp_path, [f"{i},{i % 2},A,{day}" for i, day in enumerate(days)])
    with pytest.raises(ConfigError) as error:
        data.setup()
    assert str(error.value).startswith("SplitOwn.order: ") and said in str(error.value)


def test_a_column_that_is_not_there_is_refused(tmp_path):
    data = of(tmp_path, ["1,0,A,1", "2,1,A,2"], protocol=SplitOwn(order="time"))
    expected = "SplitOwn.order: 'time'; it must be one of the columns, which are x, y, site, day"
    with pytest.raises(ConfigError, match=expected):
        data.setup()


def test_large_random_series_are_cut_where_the_order_says(tmp_path):
    rng = np.random.default_rng(0)
    day = rng.permutation(60)
    site = rng.integers(0, 3, 60)
    rows = [f"{i},{i % 2},{s},{d}" for i, (s, d) in enumerate(zip(site, day, strict=True))]
    data = of(tmp_path, rows)
    for client in range(3):
        train, val, test = (day[part[client]] for part in data.partition.splits.values())
        assert train.max() < val.min() and val.max() < test.min()
