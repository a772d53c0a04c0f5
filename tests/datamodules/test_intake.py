"""What becomes of cells without a value, of categories and of series, with values by hand."""

import json
import math

import numpy as np
import pytest
import torch

from datamodules import (
    LEAF,
    ArrayDataModule,
    ConfigError,
    Groups,
    Natural,
    Normalize,
    OfficialSplit,
    SplitOwn,
    TableDataModule,
)
from tests.commands import python
from tests.refusal import refused

# a: age 30 and 50 are known of a's first four rows; b has one known age only.
ROWS = """age,blood,site,y
30,A,a,1
,B,a,0
50,,a,1
1,A,b,0
,O,b,1
"""
EVERYTHING = SplitOwn(test=0.0, validation=0.0)


def of(tmp_path, text, target="y", **options):
    file = tmp_path / "rows.csv"
    file.write_text(text)
    given = {"client_column": "site", "partition": Natural(), "protocol": EVERYTHING}
    return TableDataModule(file, target, **{**given, **options})


def inputs_of(data):
    data.setup()
    return data.samples.inputs.tolist()


def test_a_missing_value_is_the_mean_of_its_clients_training_samples(tmp_path):
    data = of(tmp_path, ROWS, feature_columns=["age"], missing="mean")
    assert inputs_of(data) == [[30], [40], [50], [1], [1]]
    said = "2 missing values of 'age' are the means of their client's training samples"
    assert data.conversions == [said]


def test_the_mean_is_not_that_of_test_samples(tmp_path):
    # By y, which is the order here, each client tests on its last row: the mean is of 10 and 20.
    text = "x,y,site\n10,1,a\n20,2,a\n,3,a\n600,4,a\n"
    protocol = SplitOwn(test=0.25, validation=0.25, order="y")
    data = of(tmp_path, text, missing="mean", protocol=protocol)
    assert inputs_of(data) == [[10], [20], [15], [600]]


def test_normalization_sees_the_means_of_missing_values_beside_a_test_set():
    """The second column is 10, 20, 30 with a gap: its mean is 20, its variance 200 / 4."""
    x = np.array([[1.0, 10.0], [3.0, np.nan], [5.0, 20.0], [7.0, 30.0]])
    test = np.array([[2.0, 20.0], [4.0, np.nan]])
    data = ArrayDataModule(
        x, np.array([0, 1, 0, 1]), test, np.array([0, 1]), num_clients=1, missing="mean",
        protocol=OfficialSplit(validation=0.0), transforms=[Normalize()],
    )  # fmt: skip
    assert inputs_of(data)[1] == [3, 20] and inputs_of(data)[5] == [4, 20]
    (normalize,) = data.transforms.transforms
    assert normalize.mean == [4, 20]
    assert normalize.std == pytest.approx([math.sqrt(5), math.sqrt(50)], rel=5e-4)


def test_a_client_without_a_value_is_named(tmp_path):
    data = of(tmp_path, "x,y,site\n,0,north\n,1,north\n3,0,south\n", missing="mean")
    with pytest.raises(ConfigError) as error:
        data.setup()
    assert str(error.value) == (
        "missing: 'mean', but the client 'north' has no value of the column 'x' in its 2 training "
        "samples; the column must be left out, or missing must be 'drop'"
    )


@pytest.mark.parametrize(
    ("text", "options", "place"),
    [
        ("x,t,site,y\n1,1,a,0\n,2,a,1\nold,3,b,0\n", {}, "'x' holds 'old'"),
        ("x,t,site,y\n1,1,a,0\n,2,a,1\n7,soon,b,0\n", {}, "'t' holds 'soon'"),
        ("x,t,site,y\n1,1,a,0\n,2,a,1\n7,3,b,no\n", {"target_kind": "numbers"}, "'y' holds 'no'"),
    ],
)
@pytest.mark.parametrize("of_test", [False, True])
def test_a_wrong_row_has_its_number_in_the_file(text, options, place, of_test, tmp_path):
    """The second row is left out, so that the third one is the second of those that are read."""
    where = "row 3 after the names, of the client 'b'"
    if of_test:
        (tmp_path / "test.csv").write_text(text)
        options = {**options, "test_file": tmp_path / "test.csv"}
        where = "row 3 after the names of test.csv, of the client 'b'"
        text = "x,t,site,y\n1,1,a,0\n2,2,b,1\n"
    protocol = SplitOwn(test=0.0, validation=0.0, order="t")
    data = of(tmp_path, text, missing="drop", protocol=protocol, **options)
    with pytest.raises(ConfigError) as error:
        data.setup()
    assert place in str(error.value) and f"({where})" in str(error.value)


def test_rows_without_a_value_are_left_out_and_counted(tmp_path):
    data = of(tmp_path, ROWS, missing="drop", categories="one-hot")
    # The levels are those of the rows that are left: 30 A and 1 A.
    assert inputs_of(data) == [[30, 1], [1, 1]]
    assert data.feature_names == ["age", "blood=A"]
    assert data.samples.targets.tolist() == [1, 0]
    assert data.client_names == ["a", "b"]
    assert data.conversions == [
        "3 of 5 rows are left out, as they have no value in: 'age' 2, 'blood' 1",
        "'blood': a column of 0 and 1 for each of A",
    ]


def test_whole_numbers_with_a_gap_are_classes_when_the_gap_is_left_out(tmp_path):
    data = of(tmp_path, "x,y,site\n1,7,a\n2,,a\n3,4,a\n", missing="drop")
    data.setup()
    assert (data.class_names, data.samples.targets.tolist()) == (["4", "7"], [1, 0])


@pytest.mark.parametrize(
    "rule", [Natural("site"), Groups(None, "site"), LEAF("site", min_samples=1)]
)
def test_a_row_without_the_client_of_a_rule_is_missing(rule, tmp_path):
    text = "x,site,y\n1,a,1\n2,,0\n3,b,1\n4,a,0\n"
    given = {"feature_columns": ["x"], "client_column": None, "partition": rule}
    given["num_clients"] = None if rule.counts_clients else 2
    said = r"TableDataModule.partition: the column 'site' has no value in 1 of 4 rows; .* \(row 2 "
    for missing in ("refuse", "mean"):
        with pytest.raises(ConfigError, match=said):
            of(tmp_path, text, missing=missing, **given).setup()
    data = of(tmp_path, text, missing="drop", **given)
    assert inputs_of(data) == [[1], [3], [4]]
    rows = [data.partition.train[client].tolist() for client in range(data.num_clients)]
    assert sorted(rows) == [[0, 2], [1]]


@pytest.mark.parametrize("place", [0, 1])
def test_no_input_takes_the_place_of_another(place, tmp_path):
    names = ["ward", "ward"]
    names[place] = "ward=1"
    options = {"categories": "one-hot", "category_columns": ["ward"]}
    data = of(tmp_path, f"{names[0]},{names[1]},site,y\n1,1,a,0\n2,2,a,1\n", **options)
    with refused("TableDataModule.feature_columns: 'ward=1'; it must be a name that no level of"):
        data.setup()
    with refused("TableDataModule.feature_columns: ['x', 'x']; it must be columns", "each once"):
        of(tmp_path, "x,site,y\n1,a,0\n", feature_columns=["x", "x"])


@pytest.mark.parametrize("cell", [" ", "  ", " NA", "nan "])
def test_a_cell_with_spaces_among_numbers_is_missing(cell, tmp_path):
    """As programs write tables whose columns stand under one another."""
    text = f"age, dose,y,site\n30, 0.5,1,a\n40,{cell},0,a\n50, 1.5,1,a\n"
    data = of(tmp_path, text, missing="mean")
    assert inputs_of(data) == [[30, 0.5], [40, 1], [50, 1.5]]
    data = of(tmp_path, text, missing="drop")
    assert inputs_of(data) == [[30, 0.5], [50, 1.5]]
    with pytest.raises(ConfigError, match=r"' dose' has no value in 1 of 3 rows; .* \(row 2 "):
        of(tmp_path, text).setup()


@pytest.mark.parametrize(
    ("column", "options", "said"),
    [
        ("age", {}, "'age' has no value in 2 of 5 rows; it must have one in each row, or missing"),
        ("blood", {"missing": "mean"}, "'blood' holds 'A'; it must hold numbers, or be left out"),
        ("blood", {"missing": "mean", "categories": "codes"}, "'blood' has no value in 1 rows"),
    ],
)
def test_what_no_rule_covers_is_refused(column, options, said, tmp_path):
    data = of(tmp_path, ROWS, feature_columns=[column], **options)
    with pytest.raises(ConfigError) as error:
        data.setup()
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("options", "names", "inputs"),
    [
        ({}, ["c=A", "c=B", "c=O"], [[1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]),
        (
            {"levels": {"c": ["O", "AB", "A", "B"]}},
            ["c=O", "c=AB", "c=A", "c=B"],
            [[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]],
        ),
        ({"categories": "codes"}, ["c"], [[0], [2], [1], [0]]),
    ],
)
def test_levels_are_common_to_clients_and_files(options, names, inputs, tmp_path):
    (tmp_path / "test.csv").write_text("c,y,site\nB,0,a\nA,1,b\n")
    given = {"categories": "one-hot", "test_file": tmp_path / "test.csv"}
    given["protocol"] = OfficialSplit(validation=0.0)
    data = of(tmp_path, "c,y,site\nA,0,a\nO,1,b\n", **{**given, **options})
    assert inputs_of(data) == inputs
    assert data.feature_names == names
    assert data.category_levels == {"c": options.get("levels", {}).get("c", ["A", "B", "O"])}


def test_codes_of_wards_are_names_where_that_is_said(tmp_path):
    # 007 and 7 are two wards; in the order of text 007 < 7 < 8.
    text = "ward,x,y,site\n7,1,0,a\n007,2,1,a\n8,3,0,a\n"
    data = of(tmp_path, text, categories="codes", category_columns=["ward"])
    assert inputs_of(data) == [[1, 1], [0, 2], [2, 3]]
    assert data.conversions == ["'ward': the levels are numbers, 007 = 0, 7 = 1, 8 = 2"]


def test_a_level_that_is_not_given_is_refused(tmp_path):
    levels = {"c": ["A", "B"]}
    data = of(tmp_path, "c,y,site\nA,0,a\nO,1,a\n", categories="one-hot", levels=levels)
    with pytest.raises(ConfigError, match="the column 'c' holds 'O'; it must be one of its levels"):
        data.setup()


def test_a_level_called_na_is_that_level_in_new_rows_too(tmp_path):
    """Namibia's code: what stands in the other rows of a file does not matter."""
    text = "c,y,site\nDE,0,a\nNA,1,a\n"
    data = of(tmp_path, text, categories="one-hot", missing="mean")
    assert inputs_of(data) == [[1, 0], [0, 1]]
    new = tmp_path / "new.csv"
    for rows, expected in (("NA\nDE\n", [[0, 1], [1, 0]]), ("NA\n", [[0, 1]])):
        new.write_text(f"c\n{rows}")
        assert data.new_samples(new).inputs.tolist() == expected


SERIES = """hour,load,heat,site
1,10,0.5,a
3,30,2.5,a
2,20,1.5,a
1,100,7.0,b
2,200,8.0,b
3,300,9.0,b
4,400,6.0,b
"""


def test_windows_hold_the_past_of_one_client(tmp_path):
    protocol = SplitOwn(test=0.5, validation=0.0, order="hour")
    data = of(
        tmp_path, SERIES, "load", target_kind="numbers", window=2, order_column="hour",
        protocol=protocol,
    )  # fmt: skip
    # a: (10, 20) before 30, which is row 1. b: (100, 200) before 300, (200, 300) before 400.
    assert inputs_of(data) == [
        [[10, 20], [0.5, 1.5]],
        [[100, 200], [7.0, 8.0]],
        [[200, 300], [8.0, 9.0]],
    ]
    assert data.samples.targets.tolist() == [30, 300, 400]
    assert data.feature_names == ["load", "heat"]
    assert data.client_sizes.tolist() == [1, 1]
    assert [data.partition.test[client].tolist() for client in (0, 1)] == [[], [2]]


def test_a_horizon_is_counted_from_the_end_of_a_window(tmp_path):
    data = of(
        tmp_path, SERIES, "load", target_kind="numbers", window=1, horizon=2, order_column="hour",
        feature_columns=["load"], protocol=SplitOwn(0.0, 0.0, order="hour"),
    )  # fmt: skip
    assert inputs_of(data) == [[[10]], [[100]], [[200]]]
    assert data.samples.targets.tolist() == [30, 300, 400]


def test_windows_are_normalized_by_column_and_turned(tmp_path):
    """Without a horizon b's windows have the loads 100, 200 | 200, 300: mean 200, variance 5000."""
    from datamodules import Normalize, TimeFirst

    text = "\n".join(line for line in SERIES.splitlines() if line[-1] != "a")
    data = of(
        tmp_path, text, "load", target_kind="numbers", window=2, order_column="hour",
        protocol=SplitOwn(0.0, 0.0, order="hour"), transforms=[Normalize(of="client"), TimeFirst()],
        feature_columns=["load", "heat"],
    )  # fmt: skip
    std = 70.71  # of 70.7107, four digits
    loads = [data.dataset(0)[i][0][:, 0].tolist() for i in (0, 1)]
    assert loads == [pytest.approx([-100 / std, 0]), pytest.approx([0, 100 / std])]
    assert data.input_shape == (2, 2)


def test_two_rows_at_one_time_are_refused(tmp_path):
    data = of(
        tmp_path, SERIES.replace("2,200", "1,200"), "load", target_kind="numbers", window=2,
        order_column="hour", protocol=SplitOwn(order="hour"),
    )  # fmt: skip
    said = "the rows 4 and 5 after the names, of the client 'b', are both at 1"
    with pytest.raises(ConfigError, match=said):
        data.setup()


def test_a_split_at_random_of_a_series_is_warned_of(tmp_path):
    data = of(tmp_path, SERIES, "load", target_kind="numbers", window=2)
    with pytest.warns(UserWarning, match="SplitOwn at random puts windows that overlap into"):
        data.setup()


def test_whole_numbers_that_float32_does_not_hold_are_told(tmp_path):
    data = of(tmp_path, f"x,y,site\n{2**53 + 1},0,a\n3,1,a\n")
    data.setup()
    assert data.conversions == ["'x': rounded to float32, with 7 digits"]
    exact = of(tmp_path, f"x,y,site\n{2**53},0,a\n3,1,a\n")
    exact.setup()
    assert exact.conversions == []


def test_a_run_tells_and_keeps_what_was_changed(tmp_path):
    (tmp_path / "rows.csv").write_text(ROWS.replace("\n1,A", "\n\n1,A"))
    words = "fit --model FedAvg --model.network LogisticRegression --model.network.in_features 4 "
    words += "--model.network.num_classes 2 --trainer.max_epochs 1 --data TableDataModule "
    words += "--data.file rows.csv --data.target_column y --data.client_column site "
    words += "--data.num_clients null --data.partition Natural --data.missing mean "
    words += "--data.categories one-hot --data.protocol SplitOwn --data.protocol.test 0 "
    words += "--data.protocol.validation 0"
    done = python("-m", "pfl", *words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [
        "rows.csv: lines left out, as they are empty: 1",
        "'blood': a column of 0 and 1 for each of A, B, O",
        "5 missing values of 'age', 'blood=A', 'blood=B', 'blood=O' are the means of their client's"
        " training samples",
    ]
    assert json.loads((tmp_path / "runs/run/summary.json").read_text())["conversions"] == said
    large = "'age': mean or standard deviation above 10, which needs far smaller rates; "
    large += "transforms: [Normalize] gives each column mean 0 and standard deviation 1"
    assert done.stderr.splitlines() == [f"data: {line}" for line in (*said, large)]
    assert "data:" not in done.stdout


def test_parquet_has_the_same_rules(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    columns = {"age": [30, None, 50, 1], "c": ["A", "B", None, "B"], "y": [0, 1, 0, 1]}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    given = {"protocol": EVERYTHING, "num_clients": 1, "categories": "one-hot"}
    drop = TableDataModule(tmp_path / "a.parquet", "y", missing="drop", **given)
    assert inputs_of(drop) == [[30, 1, 0], [1, 0, 1]]
    mean = TableDataModule(tmp_path / "a.parquet", "y", missing="mean", **given)
    ages = [30, 27, 50, 1]  # (30 + 50 + 1) / 3
    levels = [[1, 0], [0, 1], [1 / 3, 2 / 3], [0, 1]]
    expected = torch.tensor([[age, *row] for age, row in zip(ages, levels, strict=True)])
    mean.setup()
    assert np.array_equal(mean.samples.inputs, expected.float())


def of_clients(tmp_path, which):
    """Normalized inputs of two clients; each is tested on its last row by `y`."""
    from datamodules import Normalize

    text = "x,y,site\n1,1,a\n3,2,a\n99,3,a\n10,1,b\n10,2,b\n14,3,b\n"
    data = of(
        tmp_path, text, target_kind="numbers", transforms=[Normalize(of=which)],
        protocol=SplitOwn(test=0.34, validation=0.0, order="y"),
    )  # fmt: skip
    rows = [
        [data.dataset(client, split)[i][0].item() for i in range(n)]
        for client in (0, 1)
        for split, n in (("train", 2), ("test", 1))
    ]
    return data, rows


def test_statistics_of_what_is_trained_on(tmp_path):
    # Trained on: 1, 3, 10, 10; their mean is 6, their variance (25 + 9 + 16 + 16) / 4 = 16.5.
    data, rows = of_clients(tmp_path, "trained")
    std = 4.062  # of 4.0620192, four digits
    assert repr(data.transforms) == f"Pipeline(Normalize(mean=[6.0], std=[{std}]))"
    expected = [[-5 / std, -3 / std], [93 / std], [4 / std, 4 / std], [8 / std]]
    for row, values in zip(rows, expected, strict=True):
        assert row == pytest.approx(values)


def test_statistics_of_each_client(tmp_path):
    # a: mean 2 and deviation 1. b: mean 10, and a constant is divided by 1.
    data, rows = of_clients(tmp_path, "client")
    assert rows == [[-1, 1], [97], [0, 0], [4]]
    assert "transforms Normalize(of='client')" in data.describe()


def test_given_numbers_are_nobodys_statistics():
    from datamodules import Normalize

    with pytest.raises(ConfigError, match=r"Normalize.of: 'client'; it must be all, as mean is"):
        Normalize([0.0], [1.0], of="client")


def test_ids_among_the_inputs_are_told(tmp_path):
    """Patients 007 and 7 would be one number; 0, 10 and -5 are numbers."""
    file = tmp_path / "t.csv"
    file.write_text("patient,age,dose,y\n007,10,0,a\n7,0,-5,b\n010,10,0.5,a\n")
    data = TableDataModule(file, "y", num_clients=1)
    data.setup()
    (line,) = data.conversions
    assert line.startswith("'patient': cells such as 007 are read as numbers; feature_columns ")


def test_a_column_of_text_names_the_key_that_takes_it(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("blood,y\nAB,a\n")
    with refused("the column 'blood' holds 'AB'", "a category (categories: one-hot or codes)"):
        TableDataModule(file, "y", num_clients=1).setup()


def test_a_column_whose_differences_float32_loses_is_told(tmp_path):
    """Neighbours of float32 at 1.7e9, between 2**30 and 2**31, are 2**7 = 128 apart.

    1,700,000,000 is 13,281,250 * 128; with 0, 40, 80 and 120 more the values become 0, 0, 128 and
    128 more, which moves them by up to 48. The variance of 0, 40, 80, 120 is 2,000.
    """
    rows = "".join(f"{1_700_000_000 + 40 * k},0.1,{k % 2},a\n" for k in range(4))
    data = of(tmp_path, f"when,constant,y,site\n{rows}")
    data.setup()
    assert data.conversions == [
        "'when', 'constant': rounded to float32, with 7 digits",
        "'when': float32 moves its values by up to 48, and their standard deviation is 44.7; "
        "subtract a constant, such as the least value, in the file",
    ]
    inputs = data.samples.inputs[:, 0]
    assert inputs.unique().tolist() == [1_700_000_000, 1_700_000_128]
    # From 17,000,000 on, between 2**24 and 2**25, even numbers are exact.
    exact = of(tmp_path, f"when,constant,y,site\n{rows}".replace("1700", "17").replace("0.1", "1"))
    exact.setup()
    assert exact.conversions == []


def test_targets_whose_differences_float32_loses_are_told(tmp_path):
    """The targets are 2**24 + 1, which float32 rounds to 2**24, and 2**24 + 2: by 1, std 1/2."""
    table = f"x,y,site\n1,{2**24 + 1}.0,a\n2,{2**24 + 2}.0,a\n"
    data = of(tmp_path, table, target_kind="numbers")
    data.setup()
    assert data.conversions == [
        "'y': rounded to float32, with 7 digits",
        "'y': float32 moves its values by up to 1, and their standard deviation is 0.5; "
        "subtract a constant, such as the least value, in the file",
    ]
