"""Tables in CSV and Parquet files, written here with known values."""

import sys
from decimal import Decimal

import jsonargparse
import numpy as np
import pyarrow as pa
import pytest
import torch

from datamodules import (
    IID,
    LEAF,
    ByValue,
    FederatedDataModule,
    FlowerRule,
    Groups,
    Natural,
    SharedTest,
    SplitOwn,
    TableDataModule,
    Within,
)

COLUMNS = {
    "age": [30, 41, 52, 63],
    "dose": [0.5, 1.5, 2.5, 0.1],
    "smoker": [True, False, False, True],
    "outcome": ["well", "ill", "well", "ill"],
    "hospital": ["north", "south", "south", "south"],
}
INPUTS = np.array([[30, 0.5, 1], [41, 1.5, 0], [52, 2.5, 0], [63, 0.1, 1]], np.float32)


def write(path, columns):
    from pyarrow import csv, parquet

    table = pa.table(columns)
    csv.write_csv(table, path) if path.suffix == ".csv" else parquet.write_table(table, path)
    return path


@pytest.fixture(params=["csv", "parquet"])
def file(request, tmp_path):
    """A function that writes columns to a file of one of the two formats."""
    return lambda columns, name="table": write(tmp_path / f"{name}.{request.param}", columns)


def test_columns_become_inputs_classes_and_clients(file):
    data = TableDataModule(
        file(COLUMNS), "outcome", client_column="hospital", partition=Natural(),
        protocol=SplitOwn(0.0, 0.0),
    )  # fmt: skip
    loaded = data.load()
    assert loaded.test is None
    assert loaded.train.inputs.dtype == torch.float32
    assert np.array_equal(loaded.train.inputs, INPUTS)
    assert loaded.train.targets.tolist() == [1, 0, 1, 0]  # ill is 0, well is 1
    assert loaded.client_ids.tolist() == COLUMNS["hospital"]
    assert (data.num_classes, data.client_sizes.tolist()) == (2, [1, 3])
    assert data.rounded_arrays == ["features"]  # 0.1


def test_features_can_be_chosen_and_ordered(file):
    data = TableDataModule(file(COLUMNS), "outcome", ["smoker", "age"], num_clients=2)
    assert np.array_equal(data.load().train.inputs, INPUTS[:, [2, 0]])
    assert data.rounded_arrays == []


@pytest.mark.parametrize(
    ("values", "targets"),
    [
        ([7, -2, 7, 30], [1, 0, 1, 2]),
        ([True, False, True, True], [1, 0, 1, 1]),
        ([0.25, 2.0, 1.0, -0.5], [0.25, 2.0, 1.0, -0.5]),
    ],
)
def test_targets_are_classes_unless_they_are_floating(values, targets, file):
    columns = {"x": [1, 2, 3, 4], "y": values}
    data = TableDataModule(file(columns), "y", num_clients=2, partition=IID())
    assert data.load().train.targets.tolist() == targets
    assert data.num_classes == (None if isinstance(values[0], float) else len(set(values)))


def test_categories_of_parquet_are_text(tmp_path):
    columns = COLUMNS | {"outcome": pa.array(COLUMNS["outcome"]).dictionary_encode()}
    data = TableDataModule(
        write(tmp_path / "a.parquet", columns), "outcome", ["age"], num_clients=2
    )
    assert data.load().train.targets.tolist() == [1, 0, 1, 0]


def test_decimal_numbers_of_parquet_are_numbers(tmp_path):
    """As data bases write prices and, without digits behind the point, ids."""
    prices = [Decimal("12.50"), Decimal("8.00"), Decimal("9.25")]
    large = [Decimal(2**64 + 1), Decimal(2**64 + 1), Decimal(2**64)]  # equal as floating numbers
    wards = [Decimal(10), Decimal(9), Decimal(9)]
    columns = {"price": prices, "ward": wards, "stay": large, "age": [Decimal("1.5"), None, None]}
    path = write(tmp_path / "a.parquet", columns)
    options = {"partition": Natural(), "protocol": SplitOwn(0.0, 0.0)}
    for kind in (None, "numbers"):
        data = TableDataModule(path, "price", ["stay"], "ward", target_kind=kind, **options)
        assert data.samples.targets.tolist() == [12.5, 8, 9.25]
        assert data.num_classes is None
        assert data.samples.inputs.tolist() == [[2**64]] * 3  # float32 holds no other near it
        assert data.client_names == ["9", "10"]
    data = TableDataModule(path, "ward", ["price"], "stay", **options)
    assert data.class_names == ["9", "10"]
    assert data.client_names == [str(2**64), str(2**64 + 1)]
    last = SplitOwn(test=0.3, validation=0.0, order="price")
    data = TableDataModule(path, "ward", ["age"], num_clients=1, missing="drop", protocol=last)
    assert data.samples.inputs.tolist() == [[1.5]]
    data = TableDataModule(path, "ward", ["price"], num_clients=1, protocol=last)
    assert data.partition.test[0].tolist() == [0]  # the highest price


@pytest.mark.parametrize("lists", [[[1.0, 2.0]] * 4, [[1.0], [2.0, 3.0], [], None]])
def test_a_column_of_lists_is_refused_and_other_columns_are_read(lists, tmp_path, one_line):
    path = write(tmp_path / "a.parquet", COLUMNS | {"scan": lists})
    chosen = ["age", "dose", "smoker"]
    data = TableDataModule(path, "outcome", chosen, num_clients=1, protocol=SplitOwn(0.0, 0.0))
    assert np.array_equal(data.samples.inputs, INPUTS)
    data = TableDataModule(path, "outcome", ["scan"], num_clients=1, missing="drop")
    with one_line("feature_columns: the column 'scan' holds [1.0", "it must hold numbers"):
        data.setup()


def test_the_index_of_a_data_frame_is_no_input(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1.0, 2, 3, 4, 5], "y": [0, 1, 0, 1, 0]})
    some = frame[frame["x"] != 2]  # pandas writes the numbers of these rows, too
    some.to_parquet(tmp_path / "some.parquet")
    data = TableDataModule(tmp_path / "some.parquet", "y", num_clients=1)
    assert data.samples.inputs.tolist() == [[1], [3], [4], [5]]
    assert data.feature_names == ["x"]
    said = "some.parquet: the index of pandas is left out, as it has no name"
    assert data.conversions == [said]
    some.rename_axis("patient").to_parquet(tmp_path / "named.parquet")  # the user's own column
    data = TableDataModule(tmp_path / "named.parquet", "y", num_clients=1)
    data.setup()
    assert data.feature_names == ["x", "patient"]


def test_an_official_test_set_has_the_same_classes(file):
    test = {"outcome": ["dead", "well"], "dose": [1.0, 2.0], "age": [1, 2], "smoker": [True, True]}
    data = TableDataModule(
        file(COLUMNS), "outcome", ["age", "dose"], test_file=file(test, "test"), num_clients=2,
        partition=IID(), protocol=SharedTest(validation=0.0),
    )  # fmt: skip
    loaded = data.load()
    # In ascending order over both files: dead, ill, well.
    assert loaded.train.targets.tolist() == [2, 1, 2, 1]
    assert loaded.test.targets.tolist() == [0, 2]
    assert loaded.test.inputs.tolist() == [[1, 1], [2, 2]]
    assert data.partition.test.sizes.tolist() == [2, 2]


def test_mistakes_are_named(file, tmp_path, one_line, monkeypatch):
    def load(path, *args, **kwargs):
        TableDataModule(path, *args, **{"num_clients": 1, "partition": IID(), **kwargs}).setup()

    path = file(COLUMNS)
    with one_line("TableDataModule.file: ", "missing.csv'; it must be the path of an existing"):
        load(tmp_path / "missing.csv", "y")
    (tmp_path / "table.xlsx").touch()
    with one_line("TableDataModule.file: ", "table.xlsx'", ".csv or .parquet"):
        load(tmp_path / "table.xlsx", "y")
    with one_line("TableDataModule.test_file: ", "existing .csv or .parquet file"):
        load(path, "outcome", test_file=tmp_path / "no.csv")
    with one_line("target_column: 'y'; it must be one of the columns, which are age, dose"):
        load(path, "y")
    with one_line("client_column: 'city'; it must be one of the columns"):
        load(path, "outcome", client_column="city")
    with one_line("feature_columns: the column 'hospital' holds 'north'; it must hold numbers"):
        load(path, "outcome")
    with one_line("feature_columns: ['outcome']; it must be columns for inputs only"):
        load(path, "outcome", ["outcome"])
    with one_line("feature_columns: []; it must be"):
        load(path, "outcome", [])
    with one_line("feature_columns: 'weight'; it must be one of the columns"):
        load(path, "outcome", ["weight"])
    holes = COLUMNS | {"age": [1, None, None, 4]}
    with one_line("the column 'age' has no value in 2 of 4 rows"):
        load(file(holes), "outcome", ["age"])
    with one_line("the column 'dose' has no value in 1 of 4 rows"):
        load(file(COLUMNS | {"dose": [1.0, float("nan"), 2.0, 3.0]}), "outcome", ["dose"])
    path.write_bytes(b"a,b\n1,2,3\n")
    with one_line("TableDataModule.file: ", "cannot be read: "):
        load(path, "a")


def test_only_parquet_needs_pyarrow(file, tmp_path, one_line, monkeypatch):
    path = file(COLUMNS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    data = TableDataModule(path, "outcome", ["age", "dose", "smoker"], num_clients=2)
    if path.suffix == ".csv":
        assert np.array_equal(data.load().train.inputs, INPUTS)
    else:
        with one_line("TableDataModule.file: ", "pyarrow must be installed", "pip install pyarrow"):
            data.load()


def test_names_of_classes_and_hospitals_are_kept(file):
    data = TableDataModule(
        file(COLUMNS), "outcome", ["age"], client_column="hospital", partition=Natural()
    )
    assert (data.class_names, data.client_names) == (["ill", "well"], ["north", "south"])


def test_a_client_column_makes_clients_unless_something_else_is_said(file):
    path = file(COLUMNS)
    data = TableDataModule(path, "outcome", client_column="hospital", protocol=SplitOwn(0.0, 0.0))
    assert data.client_names == ["north", "south"]
    assert data.client_sizes.tolist() == [1, 3]
    rule = TableDataModule(path, "outcome", client_column="hospital", num_clients=2).partitioner
    assert isinstance(rule, IID)
    rule = TableDataModule(
        path, "outcome", client_column="hospital", partition=LEAF(), num_clients=2
    ).partitioner
    assert isinstance(rule, LEAF)


def test_a_client_column_without_effect_is_told(file):
    path, rule = file(COLUMNS), IID()
    data = TableDataModule(path, "outcome", client_column="hospital", num_clients=2, partition=rule)
    with pytest.warns(UserWarning, match="'hospital' is not used by IID; with partition: Natural"):
        data.load()


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"age,y\n1,a\n2, \n3,b\n", ["the column 'y' has no value in 1 of 3 rows"]),
        (b"age,y\n1,M\xfcnchen\n2,Ulm\n", ["table.csv' has a column 'y'", "saved as UTF-8"]),
        (b"\xe4lter,y\n1,a\n2,b\n", ["table.csv'", "saved as UTF-8"]),
        (b"age,y,age\n1,a,3\n2,b,4\n", ["table.csv' has two columns 'age'"]),
        (b"age,y\n1,a\n2,b\nn/k,a\n", ["the column 'age' holds 'n/k'", "row 3"]),
        (b"age,y\n1,a\n1_0,b\n", ["the column 'age' holds '1_0'", "row 2"]),
        (b"age,y\n1,a\nNA,b\n", ["the column 'age' has no value in 1 of 2 rows"]),
        (b"age,y\n1,a\n2\n", ["row 2 after the names has 1 cells instead of 2"]),
        (b'age,y\n1,"a\n2,b\n', ["cannot be read: unexpected end of data"]),
        ("age,y\n1,a\n".encode("utf-16"), ["table.csv' holds the character NUL", "saved as UTF-8"]),
        (b"age;y\n1,5;a\n2;b\n", ["table.csv' has semicolons between its cells"]),
        (b",age,y\n0,1,a\n", ["table.csv' has a column without a name", "leave it out"]),
        (b"age,y\n", ["a file with at least one row"]),
        (b"", ["a file with at least one row"]),
    ],
)
def test_damaged_csv_files_are_refused(content, parts, tmp_path, one_line):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with one_line("TableDataModule.", *parts):
        TableDataModule(path, "y", num_clients=1, partition=IID()).setup()


def test_csv_cells_have_the_kind_of_their_column(tmp_path):
    """Quoted commas and line ends, an empty line, a byte order mark, NA as a word and as a gap."""
    text = 'who,big,gap,truth,"a, b"\r\nNA,9999999999999999999,1,TRUE,"x\ny"\r\n'
    text += '\r\n7,1e3,NA,false,"z"\r\n'
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    data = TableDataModule(tmp_path / "a.csv", "a, b", ["big", "truth"], num_clients=1)
    loaded = data.load()
    assert loaded.train.inputs.tolist() == [[float(np.float32(1e19)), 1.0], [1000.0, 0.0]]
    assert data.class_names == ["x\ny", "z"]
    assert loaded.columns["gap"].tolist() == [1, None]


def from_yaml(text):
    """Builds a data module from YAML, as a Lightning command line does."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(FederatedDataModule, "data")
    return parser.instantiate(parser.parse_string(text)).data


def of_cells(path, cells, targets=("0", "1")):
    """A CSV file with the cells as the column `site`, each in two rows, one of each target."""
    rows = [f"{i},{cell},{target}" for i, cell in enumerate(cells) for target in targets]
    path.write_text("\n".join(["a,site,y", *rows, ""]), encoding="utf-8")
    return path


IDS = [
    # The cells in the order of their clients: of numbers where all are plain, else of text.
    ["-3", "0", "7", "12", "100"],
    ["007", "07", "12", "7"],
    ["02134", "2134", "90210"],
    ["100", "100.0", "1e2", "3"],
    ["3", "\u0663", "\uff14"],  # 3, an Arabic three, a four of full width
    ["+7", "7"],
    [" 7", "7"],
    ["1.10", "1.2", "1.20"],
    ["36893488147419103231", "36893488147419103232"],  # equal as floating numbers
    ["TRUE", "true"],
]


@pytest.mark.parametrize("cells", IDS, ids=lambda cells: cells[0])
@pytest.mark.parametrize("by", ["client_column", "Natural", "LEAF", "Groups", "Within"])
def test_each_text_of_an_id_is_a_client_of_that_name(cells, by, tmp_path):
    path = of_cells(tmp_path / "a.csv", cells[::-1])  # their order in the file is another one
    rules = {
        "client_column": Natural(),
        "Natural": Natural("site"),
        "LEAF": LEAF("site", min_samples=2),
        "Groups": Groups([[cell] for cell in cells], "site"),
        "Within": Within(Natural("site"), IID()),
    }
    column = "site" if by == "client_column" else None
    if by == "Groups" and cells[0] == "-3":  # whole numbers, as they are in the group
        rules[by] = Groups([[int(cell)] for cell in cells], "site")
    number = len(cells) if by == "Within" else None
    data = TableDataModule(
        path, "y", ["a"], column, partition=rules[by], num_clients=number,
        protocol=SplitOwn(0.0, 0.0),
    )  # fmt: skip
    rows = [data.partition.train[client].tolist() for client in range(data.num_clients)]
    # The rows 0 and 1 of the file have its first cell, which is the last one of `cells`.
    first = [2 * (len(cells) - 1 - place) for place in range(len(cells))]
    assert rows == [[row, row + 1] for row in first]
    if by != "Within":
        assert data.client_names == cells


@pytest.mark.parametrize("cells", [c for c in IDS if c[0] not in ("TRUE", "1.10", "100")])
def test_each_text_of_a_target_is_a_class_of_that_name(cells, tmp_path):
    path = of_cells(tmp_path / "a.csv", "12", cells[::-1])
    data = TableDataModule(path, "y", ["a"], num_clients=1)
    assert data.class_names == cells
    assert data.samples.targets.tolist() == [*range(len(cells))][::-1] * 2


def test_a_test_file_decides_with_the_training_file_what_is_text(tmp_path):
    train = of_cells(tmp_path / "train.csv", ["7", "12"], ["1", "2"])
    test = of_cells(tmp_path / "test.csv", ["007", "7"], ["1", "01"])
    data = TableDataModule(
        train, "y", ["a"], "site", test, partition=Natural(), protocol=SplitOwn(0.0, 0.0)
    )
    assert data.client_names == ["007", "12", "7"]
    assert data.class_names == ["01", "1", "2"]
    # Rows: 7, 7, 12, 12 of the training file, then 007, 007, 7, 7 of the other one.
    assert [data.partition.train[i].tolist() for i in range(3)] == [[4, 5], [2, 3], [0, 1, 6, 7]]
    assert data.samples.targets.tolist() == [1, 2, 1, 2, 1, 0, 1, 0]


def test_a_rule_by_value_still_takes_numbers(tmp_path):
    path = of_cells(tmp_path / "a.csv", ["1e1", "9.5", "009"])
    data = TableDataModule(
        path, "y", ["a"], num_clients=3, partition=ByValue("site"), protocol=SplitOwn(0.0, 0.0)
    )
    # In the order of the numbers 9, 9.5 and 10.
    assert [data.partition.train[i].tolist() for i in range(3)] == [[4, 5], [2, 3], [0, 1]]


def test_a_column_of_floating_numbers_can_be_of_classes(file, tmp_path, one_line):
    """As pandas writes whole numbers where one was missing."""
    path = file({"x": [1, 2, 3, 4], "y": [10.0, 0.0, 2.0, 10.0]})
    if path.suffix == ".csv":  # pyarrow writes 10
        path.write_text("x,y\n1,10.0\n2,0.0\n3,2.0\n4,10.0\n")
    assert TableDataModule(path, "y", num_clients=1).num_classes is None
    data = TableDataModule(path, "y", num_clients=1, target_kind="classes")
    assert data.class_names == ["0", "2", "10"]
    assert data.samples.targets.tolist() == [2, 0, 1, 2]
    with one_line("TableDataModule.target_kind: 'class'; it must be classes or numbers, or null"):
        TableDataModule(path, "y", num_clients=1, target_kind="class")
    texts = of_cells(tmp_path / "a.csv", "1", ["1e2", "100", "100.0"])
    data = TableDataModule(texts, "y", ["a"], num_clients=1, target_kind="classes")
    assert data.class_names == ["100", "100.0", "1e2"]


def test_a_column_of_whole_numbers_can_be_of_values(file, one_line):
    path = file({"x": [1, 2, 3, 4], "y": [0, 1, 1, 7], "z": ["1", "b", "1", "1"]})
    data = TableDataModule(path, "y", ["x"], num_clients=1, target_kind="numbers")
    assert data.num_classes is None and data.class_names is None
    assert data.samples.targets.dtype == torch.float32
    assert data.samples.targets.tolist() == [0, 1, 1, 7]
    data = TableDataModule(path, "z", ["x"], num_clients=1, target_kind="numbers")
    with one_line("target_column: the column 'z' holds 'b'; it must hold numbers (row 2 after"):
        data.setup()


@pytest.mark.parametrize("written", [("true", "false"), ("TRUE", "FALSE"), ("True", "False")])
def test_names_of_true_and_false_have_any_case(written, tmp_path):
    """A spreadsheet writes TRUE, pandas True and a data base true."""
    path = of_cells(tmp_path / "a.csv", "12", written)
    data = TableDataModule(path, "y", ["a"], num_clients=1)
    assert data.class_names == ["False", "True"]
    for names in (["false", "true"], ["False", "True"], ["FALSE", "TRUE"]):
        for given, targets in ((names, [1, 0, 1, 0]), (names[::-1], [0, 1, 0, 1])):
            data = TableDataModule(path, "y", ["a"], num_clients=1, class_names=given)
            assert data.samples.targets.tolist() == targets
            assert data.class_names == given


@pytest.mark.parametrize("sites", [["007", "7"], ["12", "7"]])
def test_quoted_ids_of_groups_in_yaml_are_text(sites, tmp_path, one_line):
    """In quotes, 007 is not the number 7; where the ids of the file are numbers, "12" is 12."""
    path = of_cells(tmp_path / "a.csv", sites)
    text = """
data:
  class_path: TableDataModule
  init_args:
    file: {}
    target_column: y
    feature_columns: [a]
    client_column: site
    protocol: {{class_path: SplitOwn, init_args: {{test: 0.0, validation: 0.0}}}}
    partition: {{class_path: Groups, init_args: {{groups: {}}}}}
"""
    data = from_yaml(text.format(path, [[site] for site in sites]))
    assert data.client_names == sites
    assert [data.partition.train[i].tolist() for i in range(2)] == [[0, 1], [2, 3]]
    if sites[0] == "007":
        with one_line("Groups.groups: 7; it must be groups of ids that samples have, such as '0"):
            from_yaml(text.format(path, "[[007]]")).setup()
    with one_line("Groups.groups: ", "without ids in two places (['7'])"):
        Groups([["7"], [7]], "site")


def test_flowers_rule_of_natural_ids_takes_text():
    rule = FlowerRule("NaturalIdPartitioner", {"partition_by": "site"})
    assert rule.id_columns == ("site",)
    by_number = FlowerRule("ContinuousPartitioner", {"partition_by": "age"})
    assert by_number.id_columns == () == ByValue("age").id_columns == IID().id_columns
    assert Within(Natural("a"), Groups(client_ids="b")).id_columns == ("a", "b")
    assert Natural(["x", "y"]).id_columns == ()
