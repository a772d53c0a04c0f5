"""A column of texts as the inputs of a table, in CSV and Parquet files."""

import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet

from datamodules import TableDataModule

COLUMNS = {
    "user": ["07", "7", "7", "07"],
    "text": ["Hé", "NA", "a much longer one", "12"],
    "stars": [1, 5, 3, 5],
}


@pytest.fixture(params=["csv", "parquet"])
def file(request, tmp_path):
    """A function that writes columns to a file of one of the two formats."""

    def write(columns, name="texts"):
        path = tmp_path / f"{name}.{request.param}"
        table = pa.table(columns)
        if path.suffix == ".csv":
            csv.write_csv(table, path)
        else:
            parquet.write_table(table, path)
        return path

    return write


def module(path, **arguments):
    given = {"text_column": "text", "length": 4, "client_column": "user", **arguments}
    return TableDataModule(path, "stars", **given)


def test_texts_become_their_bytes_plus_one(file):
    """é is the bytes 195 and 169; "NA" and "12" are texts like others."""
    data = module(file(COLUMNS))
    loaded = data.load()
    expected = [[73, 196, 170, 0], [79, 66, 0, 0], [98, 33, 110, 118], [50, 51, 0, 0]]
    assert loaded.train.inputs.tolist() == expected
    assert loaded.train.inputs.dtype == torch.int64
    assert loaded.class_names == ["1", "3", "5"]
    assert loaded.client_ids.tolist() == COLUMNS["user"]
    (line,) = data.conversions
    assert line.endswith("longer ones are cut, 1 of 4, and 0 follows shorter ones")
    data.setup()
    assert data.feature_names is None
    assert data.client_names == ["07", "7"]


def test_a_tokenizer_of_ones_own_and_a_test_file(file):
    def lengths(text):
        return [len(word) for word in text.split()]

    first = file(COLUMNS)
    second = file({name: column[2:] for name, column in COLUMNS.items()}, "test")
    data = module(first, test_file=second, tokenizer=lengths)
    loaded = data.load()
    assert loaded.train.inputs.tolist() == [[2, 0, 0, 0], [2, 0, 0, 0], [1, 4, 6, 3], [2, 0, 0, 0]]
    assert loaded.test.inputs.tolist() == [[1, 4, 6, 3], [2, 0, 0, 0]]
    (line,) = data.conversions
    assert "texts become 4 whole numbers, as lengths gives them; longer ones are cut" in line


def test_a_function_is_given_by_its_path(file, one_line):
    """As in a configuration; the hub is not asked for what can only be a path of Python."""
    path = file(COLUMNS)
    data = module(path, tokenizer=f"{__name__}.len_of_all")
    assert data.load().train.inputs[:, 0].tolist() == [2, 2, 17, 2]
    assert "as len_of_all gives them" in data.conversions[0]
    for wrong, why in (
        (f"{__name__}.len_of_some", "has no attribute 'len_of_some'"),
        (f"{__name__}.COLUMNS", "it is no function"),
        ("no_such_module.words", "No module named 'no_such_module'"),
        ("tokenizer.json", "No module named 'tokenizer'"),
    ):
        with one_line(f"tokenizer: '{wrong}'; there is neither such a file here nor", why):
            module(path, tokenizer=wrong).load()


def test_a_row_without_a_text_is_refused_or_left_out(file, one_line):
    path = file({**COLUMNS, "text": ["Hé", None, "b", "c"]})
    with one_line(
        "TableDataModule.text_column: the column 'text' has no value in 1 of 4 rows",
        "missing must be 'drop'",
        "row 2 after the names, of the client '7'",
    ):
        module(path).load()
    loaded = module(path, missing="drop").load()
    assert loaded.train.inputs.tolist() == [[73, 196, 170, 0], [99, 0, 0, 0], [100, 0, 0, 0]]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"feature_columns": ["stars"]}, "feature_columns: ['stars']; it must be None"),
        ({"categories": "codes"}, "categories: 'codes'; it must be None"),
        ({"window": 2}, "window: 2; it must be None"),
        ({"missing": "mean"}, "missing: 'mean'; it must be 'refuse' or 'drop'"),
        ({"text_column": "review"}, "text_column: 'review'; it must be one of the columns"),
    ],
)
def test_what_texts_cannot_have_is_refused(arguments, line, file, one_line):
    with one_line(f"TableDataModule.{line}"):
        module(file(COLUMNS), **arguments).load()


def test_numbers_of_a_parquet_file_are_no_text(tmp_path, one_line):
    path = tmp_path / "texts.parquet"
    parquet.write_table(pa.table({**COLUMNS, "text": [1.5, 2.5, 3.5, 4.5]}), path)
    with one_line("TableDataModule.text_column: the column 'text' holds 1.5; it must hold text"):
        module(path).load()


def test_other_data_are_read_with_the_same_column_tokenizer_and_length(file):
    data = module(file(COLUMNS), tokenizer=len_of_all)
    other = TableDataModule(file(COLUMNS, "other"), "stars", client_column="user")
    data.setup()
    other.read_like(data)
    other.setup()
    assert other.samples.gather(torch.arange(4))[0].tolist() == [
        [2, 0, 0, 0],
        [2, 0, 0, 0],
        [17, 0, 0, 0],
        [2, 0, 0, 0],
    ]


def len_of_all(text):
    return [len(text)]


def test_new_rows_need_no_target(file):
    data = module(file(COLUMNS))
    samples = data.new_samples(file({"text": ["Hé", "b"]}, "new"))
    assert samples.inputs.tolist() == [[73, 196, 170, 0], [99, 0, 0, 0]]
    assert list(samples.columns) == ["text"]
    assert samples.ids["row"].tolist() == [1, 2]
    assert samples.clients is None
    assert len(data.conversions) == 1
