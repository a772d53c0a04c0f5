"""LEAF's data sets, on small files that are written here in LEAF's format."""

import json

import numpy as np
import pytest
import torch
from torchvision.transforms.functional import to_pil_image

from datamodules import (
    IID,
    CelebADataModule,
    FEMNISTDataModule,
    OfficialSplit,
    Sent140DataModule,
    ShakespeareDataModule,
    SplitOwn,
)
from tests.leaf_files import images, write


def test_femnist_keeps_writers_pixels_and_leafs_split(tmp_path):
    """Two files, whose writers are out of order; the writer f9 has a sample in each set."""
    write(tmp_path, "femnist", "train", {"f9": (images(255), [61]), "f1": (images(0, 1), [3, 9])})
    write(tmp_path, "femnist", "train", {"f5": (images(128, 2, 254), [0, 10, 36])}, "b.json")
    write(tmp_path, "femnist", "test", {"f9": (images(77), [5]), "f1": (images(78), [6])})
    write(tmp_path, "femnist", "test", {"f5": (images(79), [7])}, "b.json")
    data = FEMNISTDataModule(root=tmp_path, protocol=OfficialSplit(validation=0.0))
    assert (data.num_clients, data.num_classes) == (3, 62)
    assert data.samples.inputs.dtype == torch.uint8 and data.input_shape == (1, 28, 28)
    held = [(parts.train, parts.test) for parts in map(data.client, range(3))]
    seen = [
        [list(zip(*pixels_and_labels(data, part), strict=True)) for part in parts] for parts in held
    ]
    assert seen == [
        [[(0, 3), (1, 9)], [(78, 6)]],  # f1
        [[(128, 0), (2, 10), (254, 36)], [(79, 7)]],  # f5
        [[(255, 61)], [(77, 5)]],  # f9
    ]
    assert "own samples of the official test set" in data.describe()


def pixels_and_labels(data, index):
    """The gray value and the label of samples."""
    inputs, labels = data.samples.inputs[index], data.samples.targets[index]
    assert (inputs.amax((1, 2, 3)) == inputs.amin((1, 2, 3))).all()
    return inputs[:, 0, 0, 0].tolist(), labels.tolist()


def test_every_pixel_value_survives(tmp_path):
    """k / 255 is not exact in binary, so each of the 256 values is tried."""
    row = [[value / 255 for value in range(256)] + [0.0] * (784 - 256)]
    write(tmp_path, "femnist", "all_data", {"w": (row, [1])})
    data = FEMNISTDataModule(root=tmp_path, protocol=SplitOwn())
    assert data.samples.inputs.flatten()[:256].tolist() == list(range(256))


def test_fedpds_agents_own_one_or_two_writers(tmp_path):
    """Writer i of the first 100 belongs to agent i modulo 90: 0 and 90 to agent 0, and so on."""
    writers = {f"f{i:04}": (images(i), [i % 62]) for i in range(120)}
    write(tmp_path, "femnist", "all_data", writers)
    data = FEMNISTDataModule(root=tmp_path, writers=100, agents=90, protocol=SplitOwn(0.0, 0.0))
    expected = [[i, 90 + i] for i in range(10)] + [[i] for i in range(10, 90)]
    owned = [pixels_and_labels(data, data.partition.train[i])[0] for i in range(90)]
    assert data.num_clients == 90 and owned == expected


def test_users_with_few_samples_are_left_out(tmp_path):
    """Training and test samples count together, as for LEAF's own option -k."""
    write(tmp_path, "femnist", "train", {"a": (images(1), [1]), "b": (images(2, 3), [1, 1])})
    write(tmp_path, "femnist", "test", {"a": (images(4), [1]), "b": (images(5), [1])})
    data = FEMNISTDataModule(root=tmp_path, min_samples=3, protocol=OfficialSplit(0.0))
    assert (data.num_clients, len(data.samples)) == (1, 3)
    # Other rules and protocols take LEAF's samples, too.
    data = FEMNISTDataModule(root=tmp_path, num_clients=2, partition=IID(), protocol=SplitOwn())
    assert sum(len(p) for k in ("train", "val", "test") for p in parts_of(data, k)) == 5


def parts_of(data, split):
    """The index arrays of all clients in a split."""
    return [getattr(data.partition, split)[i] for i in range(data.num_clients)]


def test_the_latest_unsplit_folder_is_read(tmp_path):
    for folder, value in (("all_data", 1), ("sampled_data", 2), ("rem_user_data", 3)):
        write(tmp_path, "femnist", folder, {"a": (images(value), [0])})
        data = FEMNISTDataModule(root=tmp_path, protocol=SplitOwn())
        assert data.samples.inputs.max() == value


def test_shakespeare_numbers_the_characters(tmp_path):
    text = "To be, or not to be, that is the question: Whether 'tis nobler in the mind to su"
    rows = [text, text[1:] + "f", "é" * 80]
    users = {"HAMLET": (rows, ["f", "f", "\n"])}
    write(tmp_path, "shakespeare", "all_data", users)
    data = ShakespeareDataModule(root=tmp_path, protocol=SplitOwn(0.0, 0.0))
    inputs, targets = data.samples.gather(torch.arange(3))
    # LEAF's alphabet: new line 0, blank 1, nine marks 2 to 10 (the comma is the seventh, 8), digits
    # 11 to 20, marks 21 to 24, capitals 25 to 50, brackets 51 and 52, letters 53 to 78, "}" 79.
    assert inputs.dtype == torch.int32 and inputs.shape == (3, 80)
    assert inputs[0, :6].tolist() == [25 + 19, 53 + 14, 1, 53 + 1, 53 + 4, 8]
    assert inputs[1, :-1].equal(inputs[0, 1:]) and inputs[1, -1] == 53 + 5
    assert set(inputs[2].tolist()) == {79}
    assert targets.tolist() == [53 + 5, 53 + 5, 0]


def tweet(text):
    """A row of LEAF's file: id, date, query, user and text."""
    return ["2087", "Sat May 16 23:58:44 UTC 2009", "NO_QUERY", "ann", text, "training"]


TWEETS = {
    "ann": ([tweet("so cool, so good!"), tweet("bad")], [1, 0]),
    "bob": ([tweet("so bad, isn't it?")], [0]),
}


def test_sent140_counts_the_words_of_the_training_tweets(tmp_path):
    write(tmp_path, "sent140", "train", TWEETS)
    write(tmp_path, "sent140", "test", {"ann": ([tweet("new so cool")], [1])})
    data = Sent140DataModule(root=tmp_path, length=6, protocol=OfficialSplit(0.0))
    inputs, targets = data.samples.gather(torch.arange(4))
    # so: 3 times; comma and bad: twice; then "!", "?", "cool", "good", "isn't" and "it" once.
    assert data.vocabulary == ["so", ",", "bad", "!", "?", "cool", "good", "isn't", "it"]
    assert inputs.tolist() == [
        [0, 5, 1, 0, 6, 3],
        [2, 9, 9, 9, 9, 9],
        [0, 2, 1, 7, 8, 4],
        [9, 0, 5, 9, 9, 9],  # "new" is in no training tweet
    ]
    assert inputs.dtype == torch.int32 and targets.tolist() == [1, 0, 0, 1]
    short = Sent140DataModule(root=tmp_path, vocabulary_size=2, length=3)
    assert short.samples.inputs.tolist()[0] == [0, 2, 1] and short.vocabulary == ["so", ","]


@pytest.mark.parametrize("kind", ["txt", "json"])
def test_sent140_takes_the_vocabulary_of_word_vectors(kind, tmp_path):
    write(tmp_path, "sent140", "all_data", TWEETS)
    names, rows = ["bad", "so", "cool"], [[0.5, -1.0], [2.0, 0.25], [3.0, 4.0]]
    path = tmp_path / f"vectors.{kind}"
    if kind == "json":  # LEAF appends the vector of unknown words
        path.write_text(json.dumps({"vocab": names, "emba": [*rows, [0.0, 0.0]]}))
    else:
        path.write_text("bad 0.5 -1.0\nso 2.0 0.25\ncool 3.0 4.0\n")
    data = Sent140DataModule(root=tmp_path, embeddings=path, length=4, protocol=SplitOwn())
    assert data.samples.inputs.tolist() == [[1, 2, 3, 1], [0, 3, 3, 3], [1, 0, 3, 3]]
    assert data.vectors.tolist() == [*rows, [0.0, 0.0]]
    arguments = {"vocabulary_size": 1, "length": 2, "protocol": SplitOwn()}
    data = Sent140DataModule(root=tmp_path, embeddings=path, **arguments)
    assert data.samples.inputs.tolist() == [[1, 1], [0, 1], [1, 0]]
    assert data.vectors.tolist() == [rows[0], [0.0, 0.0]]


def test_celeba_reads_the_images_that_the_file_names(tmp_path):
    folder = tmp_path / "data" / "celeba" / "data" / "raw" / "img_align_celeba"
    folder.mkdir(parents=True)
    for number in range(1, 4):
        pixels = np.full((3, 218, 178), 10 * number, np.uint8)  # the size of the real images
        to_pil_image(torch.from_numpy(pixels)).save(folder / f"00000{number}.png")
    users = {"2880": (["000003.png"], [0.0]), "1": (["000001.png", "000002.png"], [1.0, 0.0])}
    write(tmp_path, "celeba", "all_data", users)
    data = CelebADataModule(root=tmp_path, protocol=SplitOwn(0.0, 0.0))
    assert data.input_shape == (3, 84, 84) and data.num_classes == 2
    owned = [pixels_and_labels(data, data.partition.train[i]) for i in range(2)]
    assert owned == [([10, 20], [1, 0]), ([30], [0])]


def test_mistakes_are_named(tmp_path, one_line):
    with one_line(
        f"FEMNISTDataModule.root: '{tmp_path}' has no file data/femnist/data/train/*.json",
        "github.com/TalwalkarLab/leaf",
        "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample",
    ):
        FEMNISTDataModule(root=tmp_path).setup()
    users = {"a": (images(1), [1]), "b": (images(2), [1])}
    path = write(tmp_path, "femnist", "train", users)
    write(tmp_path, "femnist", "test", {"c": (images(3), [1])})  # as `-t user` does
    with pytest.warns(UserWarning, match=r"1 of 3 clients have official test .*unseen: \[2\]"):
        assert FEMNISTDataModule(root=tmp_path).client_sizes.tolist() == [1, 1, 0]
    with one_line("FEMNISTDataModule.writers: 4; it must be at most 3"):
        FEMNISTDataModule(root=tmp_path, writers=4).setup()
    with one_line("FEMNISTDataModule.agents: 0; it must be a whole number of at least 1"):
        FEMNISTDataModule(root=tmp_path, agents=0)
    with one_line("FEMNISTDataModule.agents: 3; it must be at most 2, the number of writers"):
        FEMNISTDataModule(root=tmp_path, writers=2, agents=3).setup()
    with one_line("FEMNISTDataModule.min_samples: 2; it must be at most 1, the largest number"):
        FEMNISTDataModule(root=tmp_path, min_samples=2).setup()
    for text, reason in (
        ('{"users": ["a"]}', "KeyError"),
        ("[1]", "TypeError"),
        ("{", "JSONDecodeError"),
        (json.dumps({"users": ["a"], "user_data": {"a": {"x": images(1), "y": [1, 2]}}}), "a has"),
        (json.dumps({"users": ["a"], "user_data": {"a": {"x": images(0.5), "y": [1]}}}), "pixel"),
    ):
        path.write_text(text)
        with one_line(f"the file '{path}' cannot be read", reason, "a file of LEAF's femnist"):
            FEMNISTDataModule(root=tmp_path).setup()
    write(tmp_path, "shakespeare", "all_data", {"a": (["To be"], ["x"])})
    with one_line("an input has not 80 characters"):
        ShakespeareDataModule(root=tmp_path).setup()
    write(tmp_path, "celeba", "all_data", {"1": (["000001.jpg"], [1.0])})
    with one_line("img_align_celeba/000001.jpg' is missing", "mmlab.ie.cuhk.edu.hk"):
        CelebADataModule(root=tmp_path).setup()
    with one_line("Sent140DataModule.embeddings: 'glove.txt'; it must be an existing file"):
        Sent140DataModule(root=tmp_path, embeddings="glove.txt")
    damaged = tmp_path / "damaged.txt"
    damaged.write_text("so 1.0 2.0\nbad 1.0\n")
    write(tmp_path, "sent140", "all_data", TWEETS)
    with one_line(f"embeddings: '{damaged}' cannot be read"):
        Sent140DataModule(root=tmp_path, embeddings=damaged).setup()


@pytest.mark.parametrize("label", [0.5, float("nan"), float("inf")])
def test_labels_that_are_not_whole_are_refused(label, tmp_path, one_line):
    write(tmp_path, "femnist", "all_data", {"w": (images(1, 2), [1.0, label])})
    with one_line("FEMNISTDataModule.root", f"a label is {label}, which is not a whole number"):
        FEMNISTDataModule(root=tmp_path, protocol=SplitOwn()).setup()


def test_users_listed_twice_and_files_without_users_are_refused(tmp_path, one_line):
    write(tmp_path, "femnist", "all_data", {"w": (images(1), [1])})
    write(tmp_path, "femnist", "all_data", {"w": (images(2), [1])}, "b.json")
    with one_line("FEMNISTDataModule.root: the file", "b.json", "the user w is listed twice"):
        FEMNISTDataModule(root=tmp_path, protocol=SplitOwn()).setup()
    for name in ("a.json", "b.json"):
        write(tmp_path, "femnist", "rem_user_data", {}, name)
    with one_line("FEMNISTDataModule.root", "rem_user_data' have no users"):
        FEMNISTDataModule(root=tmp_path, protocol=SplitOwn()).setup()
