"""Data that cannot be trained on, and a ``load`` or a data set of a user's own that is wrong."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from datamodules import (
    ArrayDataModule,
    DatasetSamples,
    FederatedDataModule,
    Loaded,
    SharedTest,
    TensorDataModule,
    TensorSamples,
    samples,
)

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
    """Its ``load`` returns what it was given."""

    def __init__(self, loaded):
        super().__init__(num_clients=2)
        self.loaded = loaded

    def load(self):
        return self.loaded


@pytest.mark.parametrize("key", ["inputs", "targets", "test_inputs", "test_targets"])
def test_what_is_not_finite_is_refused_before_training(key, one_line, tmp_path):
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
        with one_line(f"{key} hold NaN or infinite values", " 3 of 10 samples"):
            module.setup()


def test_too_large_for_float32_is_refused(one_line, recwarn):
    with one_line("inputs hold", "infinite values (as float32) in 1 of 3 samples"):
        ArrayDataModule(np.array([[1.0], [1e300], [2.0]]), np.arange(3), num_clients=2).setup()
    assert not recwarn.list


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_values_are_looked_through_in_blocks(kind, one_line, monkeypatch):
    monkeypatch.setattr(samples, "_BLOCK", 12)
    # Their sum is infinite, but none of them is.
    values = torch.full((7, 5), torch.finfo(kind).max, dtype=kind)
    samples.check_finite("inputs", values)
    samples.check_finite("inputs", values.t())
    samples.check_finite("inputs", values[:, :0])
    values[0, 4] = values[3, 0] = values[3, 1] = values[6, 2] = torch.nan
    with one_line("in 3 of 7"):
        samples.check_finite("inputs", values)
    with one_line("in 4 of 5"):
        samples.check_finite("inputs", values.t())


WRONG: list[Any] = [Items((X[0], 0)), TensorSamples(X, Y), X]


@pytest.mark.parametrize(
    ("loaded", "parts"),
    [
        (Items((X[0], 0)), ["load() of Loading returned Items", "Loaded(train, test)"]),
        (TensorSamples(X, Y), ["returned TensorSamples", "Loaded(train, test)"]),
        ((TensorSamples(X, Y), None), ["returned tuple", "Loaded(train, test)"]),
        (None, ["returned NoneType"]),
        (Loaded(*WRONG[:1]), ["Loaded of Items", "DatasetSamples(dataset, targets)"]),
        (Loaded(*WRONG[1:]), ["Loaded of Tensor;", "TensorSamples(inputs, targets)"]),
    ],
)
def test_load_must_return_samples(loaded, parts, one_line):
    with one_line(*parts):
        Loading(loaded).setup()


class Picture:
    """Stands for a PIL image, which is no tensor."""


@pytest.mark.parametrize(
    ("items", "parts"),
    [
        ([(Picture(), 0)], ["a tuple of Picture, int"]),
        ([(X[0], 0), (X[1], 1, 2)], ["a tuple of Tensor, int, int"]),
        ([(X[0], 0), (X[1, :1], 1)], ["inputs all of one shape", "[2, 2]", "[1, 2]"]),
        ([(X[0], 0), (X[1], torch.zeros(2))], ["[2]"]),
        ([X[0], X[1]], ["of type Tensor"]),
        ([{"x": X[0], "y": 0}], ["of type dict"]),
    ],
)
def test_items_must_be_pairs(items, parts, one_line):
    with one_line("items must be pairs (input, target)", *parts):
        DatasetSamples(Items(*items)).gather(torch.arange(len(items)))


def test_errors_of_the_data_set_itself_are_not_hidden():
    class Broken(Items):
        def __getitem__(self, i):
            raise ValueError("a bug of its own")

    with pytest.raises(ValueError, match=r"^a bug of its own$"):
        DatasetSamples(Broken(1, 2)).gather(torch.arange(2))


def test_arrays_and_lists_are_taken():
    for found in (
        TensorSamples(X.numpy(), Y.numpy()),
        TensorSamples(X, Y.tolist()),
        TensorDataModule(X.numpy(), Y.numpy(), num_clients=2).samples,
        DatasetSamples(Items(*zip(X, Y.tolist(), strict=True)), Y.tolist()),  # as of ImageFolder
        DatasetSamples(Items(*zip(X, Y.tolist(), strict=True)), Y.numpy().astype(np.uint8)),
    ):
        assert torch.equal(found.targets, Y) and found.targets.dtype == torch.int64
        x, y = found.gather(torch.tensor([4, 1]))
        assert torch.equal(x, X[[4, 1]]) and torch.equal(y, Y[[4, 1]])


def test_what_is_no_tensor_is_refused(one_line):
    with one_line("targets of type list", "torch.as_tensor"):
        TensorSamples(X, ["cat", "dog"] * 3)
    with one_line("targets of type list", "torch.as_tensor"):
        DatasetSamples(Items(1, 2), ["cat", "dog"])
    with one_line("inputs of type Picture"):
        TensorSamples(Picture(), Y)
    with one_line("targets of shape ()", "2 items"):
        DatasetSamples(Items(1, 2), torch.tensor(1))
