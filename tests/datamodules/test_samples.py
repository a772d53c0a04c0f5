"""Samples in memory and streamed samples have the same interface."""

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from datamodules import DatasetSamples, MappedSamples, TensorSamples
from pfl.datamodules.samples.samples import concatenate
from pfl.datamodules.transforms.transform import channel_statistics

X = torch.arange(24.0).reshape(6, 2, 2)
Y = torch.tensor([0, 1, 2, 0, 1, 2])


class Labelled(Dataset):
    """A data set whose items are pairs of an array and a Python number, as in many data sets."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return X[i].numpy(), int(Y[i])


@pytest.mark.parametrize(
    "samples",
    [
        TensorSamples(X, Y),
        MappedSamples(X, Y),
        DatasetSamples(TensorDataset(X, Y), Y),
        DatasetSamples(Labelled(), Y),
    ],
    ids=["tensors", "mapped", "dataset of tensors", "dataset of arrays"],
)
@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (2, 1, 2), (0,), (0, 3)])
def test_gather_accepts_an_index_of_any_shape(samples, shape):
    index = torch.randint(6, shape, generator=torch.Generator().manual_seed(0))
    x, y = samples.gather(index)
    assert torch.equal(x, X[index])
    assert torch.equal(y, Y[index])
    assert y.dtype == torch.int64
    assert len(samples) == 6
    assert samples.input_shape == (2, 2)


def test_uint8_is_scaled_when_gathered():
    images = torch.tensor([[[0, 51]], [[255, 102]]], dtype=torch.uint8)
    expected = torch.tensor([[[0.0, 0.2]], [[1.0, 0.4]]])
    for samples in (
        TensorSamples(images, torch.zeros(2)),
        DatasetSamples(TensorDataset(images, torch.zeros(2))),
    ):
        torch.testing.assert_close(samples.gather(torch.arange(2))[0], expected)
    assert TensorSamples(images, torch.zeros(2)).nbytes == 4 + 2 * 4
    assert images.tolist() == [[[0, 51]], [[255, 102]]]


def test_a_table_of_uint8_is_not_scaled():
    """Ages of 51 and 102 years are 51 and 102, as they would be in a CSV file."""
    table = torch.tensor([[0, 51], [255, 102]], dtype=torch.uint8)
    for samples in (
        TensorSamples(table, torch.zeros(2)),
        DatasetSamples(TensorDataset(table, torch.zeros(2))),
    ):
        inputs, _ = samples.gather(torch.tensor([1, 0, 1]))
        assert inputs.dtype == torch.float32
        assert inputs.tolist() == [[255, 102], [0, 51], [255, 102]]
    assert channel_statistics(table)[0] == [127.5, 76.5]


def test_gather_keeps_all_types_but_uint8():
    tokens, targets = torch.arange(6).reshape(3, 2), torch.rand(3, 4, dtype=torch.float64)
    x, y = TensorSamples(tokens, targets).gather(torch.tensor([2, 0]))
    assert x.dtype == torch.int64
    assert torch.equal(y, targets[[2, 0]])
    assert TensorSamples(tokens, torch.tensor([True, False, True])).targets.dtype == torch.int64


def test_to_copies_only_to_another_device():
    samples = TensorSamples(X, Y)
    assert samples.to("cpu") is samples
    moved = samples.to("meta")
    assert moved.gather(torch.zeros(3, dtype=torch.int64, device="meta"))[0].device.type == "meta"
    streamed = DatasetSamples(TensorDataset(X, Y), Y).to("meta")
    assert streamed.gather(torch.arange(3))[0].device.type == "meta"
    assert streamed.nbytes == 0


def test_concatenation_appends_the_second_samples():
    for parts in (
        (TensorSamples(X[:4], Y[:4]), TensorSamples(X[4:], Y[4:])),
        (
            DatasetSamples(TensorDataset(X[:4], Y[:4]), Y[:4]),
            DatasetSamples(TensorDataset(X[4:], Y[4:]), Y[4:]),
        ),
    ):
        joined = concatenate(*parts)
        assert torch.equal(joined.targets, Y)
        assert torch.equal(joined.gather(torch.arange(6))[0], X)


def test_wrong_samples_are_refused(one_line):
    with one_line("TensorSamples.targets.shape: (5,); it must be (6, ...)"):
        TensorSamples(X, Y[:5])
    with one_line("TensorSamples.inputs.shape: (0, 2, 2)"):
        TensorSamples(X[:0], Y[:0])
    with one_line("DatasetSamples.targets.shape: (5,); it must be (6, ...)"):
        DatasetSamples(TensorDataset(X, Y), Y[:5])
    with one_line("test_inputs.shape: (6, 2); it must be (N, 2, 2), as of inputs"):
        concatenate(TensorSamples(X, Y), TensorSamples(X[:, 0], Y))
    with one_line("test_targets.dtype: torch.float32; it must be torch.int64"):
        concatenate(TensorSamples(X, Y), TensorSamples(X, Y.float()))
    with one_line("Loaded.test: DatasetSamples", "Loaded.train is TensorSamples"):
        concatenate(TensorSamples(X, Y), DatasetSamples(TensorDataset(X, Y), Y))
    with one_line("DatasetSamples.targets: given for only one"):
        concatenate(DatasetSamples(Labelled(), Y), DatasetSamples(Labelled()))
