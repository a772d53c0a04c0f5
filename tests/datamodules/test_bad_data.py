"""Errors for unusable data, and for a wrong `load` or data set of a user."""

from typing import Any

import numpy as np
import pandas
import pytest
import scipy.sparse
import torch
from torch.utils.data import Dataset

from datamodules import (
    ArrayDataModule,
    ByValue,
    DatasetSamples,
    FederatedDataModule,
    Loaded,
    SharedTest,
    SplitOwn,
    TableDataModule,
    TensorDataModule,
    TensorSamples,
)
from pfl.datamodules.samples import samples

X = torch.arange(24.0).reshape(6, 2, 2)
Y = torch.tensor([0, 1, 2, 0, 1, 2])


class Items(Dataset):
    """A data set with the given items."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Loading(FederatedDataModule):
    """A data module whose `load` returns the argument of the constructor."""

    def __init__(self, loaded):
        super().__init__(num_clients=2)
        self.loaded = loaded

    def load(self):
        return self.loaded


@pytest.mark.parametrize(
    ("targets", "ids", "key"), [(9, 10, "targets"), (10, 9, "client_ids"), (10, 11, "client_ids")]
)
def test_numbers_of_samples_that_differ_are_named_before_some_are_dropped(
    targets, ids, key, one_line
):
    x = np.zeros((10, 2))
    x[3, 1] = np.nan
    given = {"targets": np.zeros(targets, int), "client_ids": np.arange(ids)}
    with one_line(f"{key}.shape", "(10,"):
        ArrayDataModule(x, **given, num_clients=1, missing="drop")


@pytest.mark.parametrize(
    ("options", "key"),
    [({"scale_targets": True}, "Streamed.scale_targets"), ({"partition": ByValue()}, "ByValue")],
)
def test_targets_that_are_only_streamed_have_no_mean_and_no_order(options, key, one_line):
    class Streamed(FederatedDataModule):
        def load(self):
            items = [(torch.zeros(2), torch.tensor(float(i))) for i in range(8)]
            return Loaded(DatasetSamples(Items(*items)))

    with one_line(key, "DatasetSamples(data, targets)"):
        Streamed(num_clients=2, **options).setup()


@pytest.mark.parametrize("key", ["inputs", "targets", "test_inputs", "test_targets"])
def test_nan_and_infinite_values_are_refused_before_training(key, one_line, tmp_path):
    rng = np.random.default_rng(0)
    data = {name: rng.normal(size=(10, 3)) for name in ("inputs", "test_inputs")}
    data |= {name: rng.normal(size=10) for name in ("targets", "test_targets")}
    data[key][[2, 7]] = np.nan
    data[key][4] = -np.inf
    np.savez(tmp_path / "nan.npz", **data)
    tensors = {name: torch.from_numpy(array) for name, array in data.items()}
    for module in (
        ArrayDataModule(file=tmp_path / "nan.npz", num_clients=2, protocol=SharedTest()),
        ArrayDataModule(**data, num_clients=2),
        TensorDataModule(**tensors, num_clients=2),
    ):
        with one_line(f"{key}: NaN or infinite values", " 3 of 10 samples"):
            module.setup()


def test_float64_values_too_large_for_float32_are_refused(one_line, recwarn):
    with one_line("inputs: NaN or", "infinite values (as float32) in 1 of 3 samples"):
        ArrayDataModule(np.array([[1.0], [1e300], [2.0]]), np.arange(3), num_clients=2).setup()
    assert not recwarn.list


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_only_values_that_are_not_finite_are_refused_in_blocks_with_an_infinite_sum(
    kind, one_line, monkeypatch
):
    monkeypatch.setattr(samples, "_BLOCK", 12)
    # The sum of these values is infinite, but every value is finite.
    values = torch.full((7, 5), torch.finfo(kind).max, dtype=kind)
    samples.check_finite("inputs", values)
    samples.check_finite("inputs", values.t())
    samples.check_finite("inputs", values[:, :0])
    values[0, 4] = values[3, 0] = values[3, 1] = values[6, 2] = torch.nan
    with one_line("in 3 of 7"):
        samples.check_finite("inputs", values)
    with one_line("in 4 of 5"):
        samples.check_finite("inputs", values.t())


@pytest.mark.parametrize("key", ["inputs", "targets"])
def test_whole_numbers_that_int64_does_not_hold_are_refused(key, one_line):
    """PyTorch has few operations for uint64, and as int64 2**64 - 1 is -1."""
    given = {"inputs": np.zeros((3, 1), np.uint64), "targets": np.zeros(3, np.uint64)}
    data = ArrayDataModule(**given, num_clients=1)
    assert data.samples.targets.dtype == torch.int64
    given[key][1] = 2**64 - 1
    with one_line(f"ArrayDataModule.{key}: the largest value", str(2**64 - 1), "below 2**63"):
        ArrayDataModule(**given, num_clients=1)


@pytest.mark.parametrize("most", [2**24, 1_700_000_000, 2**53 + 1])
def test_whole_numbers_that_are_no_classes_are_refused(most, one_line):
    """Prices, times or ids: a count for each of so many classes does not fit into memory."""
    targets = np.array([3, most, 5])
    ids = ["a", "b", "b"]
    with one_line(
        f"targets: largest target: {most}", "floating numbers: sample 1 (of the client 'b"
    ):
        ArrayDataModule(np.zeros((3, 1)), targets, client_ids=ids, num_clients=1).setup()
    targets[1] = 2**24 - 1
    assert ArrayDataModule(np.zeros((3, 1)), targets, num_clients=1).num_classes == 2**24


def test_masked_values_are_missing(one_line):
    """Files of measurements are read as masked arrays, with 1e20 where there is no value."""
    x = np.ma.masked_values(np.array([[1.0], [1e20], [5.0], [6.0]]), 1e20)
    y = np.zeros(4, int)
    with one_line("inputs: NaN or infinite values", "1 of 4 samples, first in sample 1"):
        ArrayDataModule(x, y, num_clients=1).setup()
    everything = SplitOwn(0.0, 0.0)
    data = ArrayDataModule(x, y, num_clients=1, missing="mean", protocol=everything)
    assert data.samples.inputs.tolist() == [[1], [4], [5], [6]]  # 12 / 3
    with one_line("ArrayDataModule.targets: 'int64, with 1 masked values'", "floating"):
        ArrayDataModule(x, np.ma.masked_equal([0, 1, 2, 0], 2), num_clients=1)
    none = np.ma.masked_equal([0, 1, 1, 0], 7)
    assert ArrayDataModule(x, none, num_clients=1, missing="drop").samples.targets.tolist() == [
        0,
        1,
        0,
    ]


def test_lists_of_several_lengths_are_refused(one_line):
    with one_line("ArrayDataModule.inputs: ", "it must be an array, or lists of one length"):
        ArrayDataModule([[1, 2], [3]], [0, 1], num_clients=1)


WRONG: list[Any] = [Items((X[0], 0)), TensorSamples(X, Y), X]


@pytest.mark.parametrize(
    ("loaded", "parts"),
    [
        (Items((X[0], 0)), ["Loading.load: returned Items", "Loaded(train, test)"]),
        (TensorSamples(X, Y), ["returned TensorSamples", "Loaded(train, test)"]),
        ((TensorSamples(X, Y), None), ["returned tuple", "Loaded(train, test)"]),
        (None, ["returned NoneType"]),
        (Loaded(*WRONG[:1]), ["Loaded of Items", "DatasetSamples(dataset, targets)"]),
        (Loaded(*WRONG[1:]), ["Loaded of Tensor;", "TensorSamples(inputs, targets)"]),
    ],
)
def test_load_that_does_not_return_samples_is_refused(loaded, parts, one_line):
    with one_line(*parts):
        Loading(loaded).setup()


class Picture:
    """A stand-in for a PIL image, which cannot become a tensor."""


@pytest.mark.parametrize(
    ("items", "parts"),
    [
        ([(Picture(), 0)], ["a tuple of Picture, int"]),
        ([(X[0], 0), (X[1], 1, 2)], ["a tuple of Tensor, int, int"]),
        ([(X[0], 0), (X[1, :1], 1)], ["inputs of one shape", "[2, 2]", "[1, 2]"]),
        ([(X[0], 0), (X[1], torch.zeros(2))], ["[2]"]),
        ([X[0], X[1]], ["of type Tensor"]),
        ([{"x": X[0], "y": 0}], ["of type dict"]),
    ],
)
def test_items_other_than_pairs_of_one_shape_are_refused(items, parts, one_line):
    with one_line("DatasetSamples.dataset: an item is", "must be pairs (input, target)", *parts):
        DatasetSamples(Items(*items)).gather(torch.arange(len(items)))


def test_an_error_of_the_data_set_itself_is_raised_unchanged():
    class Broken(Items):
        def __getitem__(self, i):
            raise ValueError("a bug of its own")

    with pytest.raises(ValueError) as caught:
        DatasetSamples(Broken(1, 2)).gather(torch.arange(2))
    assert type(caught.value) is ValueError
    assert str(caught.value) == "a bug of its own"


def test_arrays_and_lists_become_tensors():
    for actual in (
        TensorSamples(X.numpy(), Y.numpy()),
        TensorSamples(X, Y.tolist()),
        TensorDataModule(X.numpy(), Y.numpy(), num_clients=2).samples,
        DatasetSamples(Items(*zip(X, Y.tolist(), strict=True)), Y.tolist()),  # as of ImageFolder
        DatasetSamples(Items(*zip(X, Y.tolist(), strict=True)), Y.numpy().astype(np.uint8)),
    ):
        assert torch.equal(actual.targets, Y) and actual.targets.dtype == torch.int64
        x, y = actual.gather(torch.tensor([4, 1]))
        assert torch.equal(x, X[[4, 1]]) and torch.equal(y, Y[[4, 1]])


def test_inputs_and_targets_that_cannot_become_tensors_are_refused(one_line):
    with one_line("TensorSamples.targets: an object of type list", "torch.as_tensor"):
        TensorSamples(X, ["cat", "dog"] * 3)
    with one_line("DatasetSamples.targets: an object of type list", "torch.as_tensor"):
        DatasetSamples(Items(1, 2), ["cat", "dog"])
    with one_line("TensorSamples.inputs: an object of type Picture"):
        TensorSamples(Picture(), Y)
    with one_line("DatasetSamples.targets.shape: (); it must be (2, ...)"):
        DatasetSamples(Items(1, 2), torch.tensor(1))


@pytest.mark.parametrize("columns", [[0, 1, 2], ["a", "b", "c"]])
def test_tables_of_pandas_name_what_makes_an_array_of_them(columns, one_line):
    table = pandas.DataFrame(np.ones((6, 3)), columns=columns)
    with one_line("TensorSamples.inputs: an object of type DataFrame", "to_numpy()"):
        TensorDataModule(table, Y, num_clients=2)
    with one_line("TableDataModule.file: 'an object of type DataFrame'; it must be the path"):
        TableDataModule(table, "c", num_clients=2)
    data = ArrayDataModule(table, pandas.Series(Y.numpy(), index=range(9, 3, -1)), num_clients=2)
    assert data.samples.inputs.tolist() == [[1, 1, 1]] * 6
    assert data.samples.targets.tolist() == Y.tolist()


def test_labels_whose_index_was_shuffled_name_what_makes_an_array_of_them(one_line):
    with one_line("TensorSamples.targets: an object of type Series", "to_numpy()"):
        TensorDataModule(X, pandas.Series(Y.numpy(), index=range(9, 3, -1)), num_clients=2)


@pytest.mark.parametrize("kind", [scipy.sparse.csr_matrix, scipy.sparse.coo_array])
def test_sparse_matrices_name_what_makes_an_array_of_them(kind, one_line):
    sparse = kind(np.eye(6))
    for module in (ArrayDataModule, TensorDataModule):
        with one_line(".inputs: ", f"an object of type {type(sparse).__name__}", "toarray()"):
            module(sparse, Y, num_clients=2)
    with one_line("TensorSamples.inputs: 'a tensor of the layout torch.sparse_coo'", "to_dense()"):
        TensorDataModule(torch.eye(6).to_sparse(), Y, num_clients=2)


def test_a_tensor_with_a_gradient_is_no_array(one_line):
    with one_line("ArrayDataModule.inputs: ", "detach", "it must be an array"):
        ArrayDataModule(torch.ones(6, 2, requires_grad=True), Y, num_clients=2)


def test_one_hot_targets_are_refused(one_line):
    rows = torch.nn.functional.one_hot(Y)
    for kind in (torch.int64, torch.float32, torch.bool):
        with one_line("targets: one-hot rows of shape (6, 3)", "of shape (6,)", "argmax(1)"):
            TensorDataModule(X, rows.to(kind), num_clients=2).setup()
    # Rows with two labels or none are several labels of a sample.
    rows[0] = 1
    TensorDataModule(X, rows.bool(), num_clients=2).setup()


@pytest.mark.parametrize(
    ("inputs", "targets", "test", "message"),
    [
        (X, Y + 1, None, "the classes are 1 to 3, and none is 0; .* needs 4 outputs"),
        (torch.rand(6, 8, 8, 3), Y, None, "which looks like images with the channels last"),
        (X, Y, (X, Y), "the official test samples are the training samples"),
    ],
)
def test_probable_mistakes_in_data_are_warned_about(inputs, targets, test, message):
    protocol = None if test is None else SharedTest()
    data = TensorDataModule(inputs, targets, *(test or ()), num_clients=2, protocol=protocol)
    with pytest.warns(UserWarning, match=f"TensorDataModule: .*{message}"):
        data.setup()


def test_test_samples_of_class_0_show_that_classes_count_from_0():
    test = X[:1] + 1, Y[:1]
    TensorDataModule(X, Y + 1, *test, num_clients=2, protocol=SharedTest()).setup()
