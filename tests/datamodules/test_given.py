"""Partitions that are saved and used again, data sets of one client, and what is left out."""

import json
import zipfile

import numpy as np
import pytest
import torch

from datamodules import (
    DigitsDataModule,
    Dirichlet,
    FedSLRDirichlet,
    Given,
    Groups,
    MatchLabels,
    Natural,
    Partition,
    Ragged,
    Sampled,
    SharedTest,
    SplitOwn,
    TensorDataModule,
)
from pfl.datamodules.partitions.partition import targets_hash

PROTOCOLS = [SplitOwn(0.3, 0.2), MatchLabels(20), SharedTest(0.0)]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=repr)
def test_a_saved_partition_comes_back_whole(protocol, tmp_path):
    first = DigitsDataModule(6, Dirichlet(0.5), protocol, seed=3)
    first.partition.save(tmp_path / "p.npz")
    again = DigitsDataModule(None, Given(tmp_path / "p.npz"), seed=99)
    assert again.num_clients == 6
    assert again.partition.hash == first.partition.hash
    for split, arrays in first.partition.splits.items():
        for client in range(6):
            assert again.partition.splits[split][client].tolist() == arrays[client].tolist()
    assert again.partition.test.is_shared == first.partition.test.is_shared
    # A partition that is saved again is the same file, with the rule that made it.
    again.partition.save(tmp_path / "q.npz")
    assert (tmp_path / "q.npz").read_bytes() == (tmp_path / "p.npz").read_bytes()


def test_the_file_is_plain_numpy_and_describes_itself(tmp_path):
    data = DigitsDataModule(3, Dirichlet(0.5), SplitOwn(0.3, 0.0), seed=3)
    data.partition.save(tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz", allow_pickle=False) as stored:
        about = json.loads(str(stored["about"]))
        ends = np.cumsum(stored["train_sizes"])
        third = stored["train_indices"][ends[1] : ends[2]]
    assert third.tolist() == data.partition.train[2].tolist()
    assert about["hash"] == data.partition.hash and about["seed"] == 3
    assert about["data"] == "DigitsDataModule" and about["samples"] == 1797
    assert about["rule"] == repr(Dirichlet(0.5)) and about["protocol"] == repr(SplitOwn(0.3, 0.0))


def test_samples_drawn_on_access_are_stored(tmp_path):
    first = DigitsDataModule(40, Sampled(20))
    first.partition.save(tmp_path / "p.npz")
    again = DigitsDataModule(None, Given(tmp_path / "p.npz"))
    for split, arrays in first.partition.splits.items():
        assert np.array_equal(again.partition.splits[split].flat, arrays.flat)


def test_another_data_set_is_refused(tmp_path, one_line):
    labels = np.arange(30) % 3
    file = tmp_path / "p.npz"
    TensorDataModule(torch.zeros(30, 2), labels, num_clients=2).partition.save(file)
    TensorDataModule(torch.ones(30, 2), labels, partition=Given(file)).setup()
    for other in (labels[:-1], labels[::-1].copy(), labels.astype(np.float32)):
        data = TensorDataModule(torch.zeros(len(other), 2), other, partition=Given(file))
        with one_line("Given.file", str(file), "TensorDataModule with 30 samples"):
            data.setup()


def test_other_clients_or_another_protocol_than_the_files_are_refused(tmp_path, one_line):
    file = tmp_path / "p.npz"
    DigitsDataModule(4, protocol=SplitOwn(0.5)).partition.save(file)
    with one_line("num_clients: 5; it must be 4 or null"):
        DigitsDataModule(5, Given(file)).setup()
    with one_line("protocol: SplitOwn(test=0.2, validation=0.1)", "left out", "test=0.5"):
        DigitsDataModule(4, Given(file), SplitOwn())
    assert DigitsDataModule(4, Given(file), SplitOwn(0.5)).describe().endswith("seed 0.")


def test_other_files_than_partitions_are_refused(tmp_path, one_line):
    with one_line("Given.file", "nowhere.npz", "existing file"):
        Given(tmp_path / "nowhere.npz")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with one_line("Given.file", "Partition.save wrote"):
        Given(tmp_path / "other.npz")
    (tmp_path / "text.npz").write_text("hello")
    with one_line("Given.file", "Partition.save wrote"):
        Given(tmp_path / "text.npz")
    with one_line("Partition.save", "can be written"):
        DigitsDataModule(4).partition.save(tmp_path / "no folder" / "p.npz")


def test_a_file_whose_arrays_were_changed_is_refused(tmp_path, one_line):
    DigitsDataModule(4).partition.save(tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz") as stored:
        arrays = dict(stored)
    arrays["train_indices"][0] += 1
    np.savez(tmp_path / "p.npz", **arrays)
    assert zipfile.is_zipfile(tmp_path / "p.npz")
    with one_line("Given.file", "hash"):
        Given(tmp_path / "p.npz")


def test_the_dataset_of_a_client_is_a_torch_dataset(one_line):
    data = DigitsDataModule(5, Dirichlet(0.5), SplitOwn(0.3, 0.2))
    for split in ("train", "val", "test"):
        dataset = data.dataset(3, split)
        indices = data.partition.splits[split][3]
        assert len(dataset) == len(indices) > 0
        image, label = dataset[1]
        expected = data.samples.gather(torch.tensor(indices[1]))
        assert torch.equal(image, expected[0]) and label == expected[1]
        batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=4)))
        assert batch[0].shape == (4, 1, 8, 8)
    with one_line("client: 5; it must be from 0 to 4"):
        data.dataset(5)
    with one_line("split: 'all'; it must be 'train', 'val' or 'test'"):
        data.dataset(3, "all")


def test_what_natural_leaves_out_is_counted():
    # Clients a, b, c have 5, 3 and 2 samples; two clients keep a and b.
    ids = np.repeat(["a", "b", "c"], [5, 3, 2])
    data = TensorDataModule(
        torch.zeros(10, 2), np.zeros(10, int), client_ids=ids, num_clients=2, partition=Natural()
    )
    assert data.left_out() == {
        "samples_unused": 2,
        "clients_without_train_samples": 0,
        "clients_without_test_samples": 0,
    }


def test_clients_without_test_samples_are_counted():
    # A client with one sample only trains (see `Protocol`). Four official test samples that the ids
    # do not cover are given to nobody.
    data = TensorDataModule(
        torch.zeros(9, 2),
        np.zeros(9, int),
        torch.zeros(4, 2),
        np.zeros(4, int),
        client_ids=np.array([0] * 7 + [1, 2]),
        partition=Natural(),
    )
    assert data.left_out()["clients_without_test_samples"] == 2
    assert data.left_out()["samples_unused"] == 4


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=repr)
def test_official_test_samples_that_a_protocol_does_not_draw_are_not_left_out(protocol):
    data = DigitsDataModule(6, Dirichlet(0.5), protocol)
    assert set(data.left_out().values()) == {0}


def test_few_drawn_clients_leave_samples_out():
    data = DigitsDataModule(2, Sampled(30))
    held = {i for arrays in data.partition.splits.values() for i in arrays.flat.tolist()}
    assert data.left_out()["samples_unused"] == 1797 - len(held)
    assert set(DigitsDataModule(2000, Sampled(30)).left_out().values()) == {0}


def written(tmp_path, about=None, **arrays):
    """A file of two clients with 3 + 3 of 8 samples, in which arrays and notes can be replaced.

    Its hash fits, as that of a file that a user's own program has written.
    """
    labels = np.arange(8) % 2
    stored = {
        "train_indices": np.array([0, 1, 4, 5]), "train_sizes": np.array([2, 2]),
        "val_indices": np.array([], int), "val_sizes": np.array([0, 0]),
        "test_indices": np.array([2, 6]), "test_sizes": np.array([1, 1]),
    }  # fmt: skip
    stored |= {key: np.array(value) for key, value in arrays.items()}
    whole = {key: value.astype(np.int64) for key, value in stored.items()}
    splits = ("train", "val", "test")
    parts = [Ragged.from_sizes(whole[f"{s}_indices"], whole[f"{s}_sizes"]) for s in splits]
    about = {
        "format": 1, "hash": Partition(*parts).hash, "samples": 8,
        "targets_hash": targets_hash(labels), **(about or {}),
    }  # fmt: skip
    np.savez(tmp_path / "p.npz", about=np.array(json.dumps(about)), **stored)
    return TensorDataModule(torch.zeros(8, 2), labels, partition=Given(tmp_path / "p.npz"))


def test_a_file_of_another_program_is_read(tmp_path):
    assert written(tmp_path).partition.train[1].tolist() == [4, 5]
    data = written(tmp_path, train_indices=np.array([0, 1, 4, 5], np.uint64))
    assert data.partition.train[1].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({"test_indices": [1, 6]}, ["1 samples are repeated", "the sample 1 of client 0"]),
        ({"train_indices": [0, 0, 4, 5]}, ["1 samples are repeated", "the sample 0 of client 0"]),
        ({"train_indices": [0, 1, 1, 5]}, ["1 training or validation samples belong to several"]),
        ({"test_indices": [5, 6]}, ["1 training or validation samples", "shared_samples"]),
        ({"train_indices": [-1, 1, 4, 5]}, ["train_indices", "from -1 to 5", "from 0 to 7"]),
        ({"train_indices": [0, 1, 4, 8]}, ["train_indices", "from 0 to 8", "from 0 to 7"]),
        ({"train_indices": [0.0, 1.5, 4, 5]}, ["train_indices are float64", "whole numbers"]),
        ({"train_sizes": [2, 1]}, ["train_sizes add up to 3; they must add up to 4"]),
        ({"train_sizes": [3, -1]}, ["train_sizes", "from -1 to 3"]),
        ({"train_sizes": [4, 4]}, ["train_sizes add up to 8; they must add up to 4"]),
        ({"test_sizes": [1, 2]}, ["test_sizes add up to 3", "or all be that number"]),
        ({"test_indices": [2, 6, 7], "test_sizes": [1, 1, 1]}, ["'test': 3", "as many"]),
    ],
)
def test_samples_that_a_file_gives_wrongly_are_refused(arrays, parts, tmp_path, one_line):
    with one_line("Given.file", "p.npz", *parts):
        written(tmp_path, **arrays)


@pytest.mark.parametrize("names", [["a"], ["a", "a"], "ab"])
def test_names_that_a_file_gives_wrongly_are_refused(names, tmp_path, one_line):
    data = written(tmp_path, {"client_names": names})
    with one_line("client_names", repr(names), "2 different names"):
        data.setup()


def test_a_partition_without_training_samples_is_refused(tmp_path, one_line):
    data = written(tmp_path, train_indices=np.array([], int), train_sizes=[0, 0])
    with one_line("TensorDataModule", "no client has a training sample"):
        data.setup()


def test_samples_that_clients_share_are_stated_in_the_file(tmp_path):
    """Two clients with 6 of 8 samples share at least 4; at most 1 is a test sample of both.

    Each of them tests on one sample, 0.2 * 6 rounded.
    """
    labels = np.arange(8) % 2
    rule = Sampled(6)
    TensorDataModule(torch.zeros(8, 2), labels, num_clients=2, partition=rule).partition.save(
        tmp_path / "p.npz"
    )
    with np.load(tmp_path / "p.npz") as stored:
        assert json.loads(str(stored["about"]))["shared_samples"] >= 3
    Given(tmp_path / "p.npz")


def test_samples_that_a_client_has_several_times_are_stated_in_the_file(tmp_path):
    """One client draws 20 samples, nearly surely all of one class: each of its 10 samples twice."""
    labels, rule = np.arange(20) % 2, FedSLRDirichlet(0.01)
    first = TensorDataModule(torch.zeros(20, 2), labels, num_clients=1, partition=rule)
    first.partition.save(tmp_path / "p.npz")
    again = TensorDataModule(torch.zeros(20, 2), labels, partition=Given(tmp_path / "p.npz"))
    assert again.partition.train.flat.tolist() == first.partition.train.flat.tolist()
    with np.load(tmp_path / "p.npz") as stored:
        assert json.loads(str(stored["about"]))["repeated_samples"] == 10


def test_names_of_clients_are_kept_by_the_rule_and_in_the_file(tmp_path):
    ids = np.repeat(["north", "east", "south"], [5, 3, 2])
    inputs, labels = torch.zeros(10, 2), np.zeros(10, int)
    data = TensorDataModule(inputs, labels, client_ids=ids, num_clients=2, partition=Natural())
    assert data.client_names == ["east", "north"]  # ascending; south has the fewest samples
    assert data.class_names is None
    data.partition.save(tmp_path / "p.npz")
    again = TensorDataModule(inputs, labels, partition=Given(tmp_path / "p.npz"))
    assert again.client_names == ["east", "north"]
    rule = Groups([["south", "north"], ["east"]])
    data = TensorDataModule(inputs, labels, client_ids=ids, partition=rule)
    assert data.client_names == ["south+north", "east"]
    assert TensorDataModule(inputs, labels, num_clients=2).client_names is None
