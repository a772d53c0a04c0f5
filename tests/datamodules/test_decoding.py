"""Images decoded in worker processes and mapped from a file equal those in memory."""

import os
from collections import namedtuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from datamodules import (
    CelebADataModule,
    DatasetSamples,
    HorizontalFlip,
    ImageFolderDataModule,
    MappedSamples,
)
from models import LogisticRegression
from pfl.algorithms import FedAvg
from pfl.datamodules.samples import images as module
from pfl.datamodules.samples.images import decode
from pfl.datamodules.samples.memory_map import train_and_test
from pfl.datamodules.samples.samples import concatenate
from tests.leaf_files import write
from tests.problems import run

NUMBER = 11


@pytest.fixture
def paths(tmp_path):
    """Images of random pixels, 5x4, in a folder each: for two classes, training and test."""
    rng, found = np.random.default_rng(0), []
    for number in range(NUMBER):
        split = "test" if number % 4 == 0 else "train"
        path = tmp_path / "set" / split / "ab"[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (5, 4, 3), np.uint8)).save(path)
        found.append(path)
    return found


@pytest.fixture
def workers(monkeypatch):
    """Two worker processes, and blocks of three images."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(module, "_BLOCK", 3)


@pytest.fixture
def no_reading(monkeypatch):
    """A function after whose call an image can be decoded in this process no more."""

    def forbid(paths, size, colour, number):
        raise AssertionError(f"{paths[number]} is decoded")

    return lambda: monkeypatch.setattr(module, "_image", forbid)


def pixels(paths):
    """The images, read with Pillow alone, uint8 [N, 3, H, W]."""
    return np.stack([np.asarray(Image.open(path)) for path in paths]).transpose(0, 3, 1, 2)


@pytest.mark.processes
def test_worker_processes_keep_the_order_of_the_files(paths, workers, tmp_path, monkeypatch):
    (tmp_path / "readers").mkdir()

    def noted(*arguments, read=module._image):
        (tmp_path / "readers" / str(os.getpid())).touch()
        return read(*arguments)

    monkeypatch.setattr(module, "_image", noted)
    expected, before = pixels(paths[::-1]), torch.get_rng_state()
    in_memory = decode(paths[::-1])
    mapped = decode(paths[::-1], cache=tmp_path / "cache")
    assert isinstance(mapped, np.memmap) and not isinstance(in_memory, np.memmap)
    for images in (in_memory, mapped):
        assert images.dtype == np.uint8 and np.array_equal(images, expected)
    assert torch.equal(torch.get_rng_state(), before)
    readers = {int(file.name) for file in (tmp_path / "readers").iterdir()}
    assert len(readers) == 2 * 2 and os.getpid() not in readers


def test_images_are_decoded_once_and_anew_when_they_change(paths, tmp_path, no_reading):
    cache = tmp_path / "cache"
    first = decode(paths, cache=cache)
    first[0] = 0  # in memory only
    Image.new("RGB", (4, 5), (1, 2, 3)).save(paths[3])
    changed = decode(paths, cache=cache)
    assert np.array_equal(changed, pixels(paths)) and (changed[3, 2] == 3).all()
    assert decode(paths, size=2, cache=cache).shape == (NUMBER, 3, 2, 2)
    assert decode(paths[1:], cache=cache).shape == (NUMBER - 1, 3, 5, 4)
    assert len(list(cache.iterdir())) == 4
    no_reading()
    assert np.array_equal(decode(paths, cache=cache), pixels(paths))
    with pytest.raises(AssertionError, match="is decoded"):
        decode(paths)


def test_a_failure_leaves_no_file(paths, tmp_path, one_line, monkeypatch, workers):
    paths[7].write_bytes(b"no image")
    for cache in (None, tmp_path / "cache"):
        with one_line(f"{paths[7]}: cannot be read as an image"):  # also from a worker process
            decode(paths, cache=cache)
    assert list((tmp_path / "cache").iterdir()) == []
    Image.new("RGB", (4, 6)).save(paths[7])
    with one_line(f"but {paths[0]} and {paths[7]} have the shapes 3x5x4 and 3x6x4"):
        decode(paths, cache=tmp_path / "cache")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(free=2**20))
    big = [paths[1]] * 20000  # 20,000 images of 60 bytes are 1.1 MiB
    with one_line("cache: ", "has 1 MiB of free space; it must have 1 MiB for 20000 samples"):
        decode(big, cache=tmp_path / "cache")


def test_a_folder_with_a_cache_equals_the_folder_in_memory(paths, tmp_path, no_reading):
    arguments = {"num_clients": 3, "batch_size": 2, "seed": 4}
    folder, cache = tmp_path / "set", tmp_path / "cache"
    memory = ImageFolderDataModule(folder, "split/class", **arguments)
    memory.setup()
    ImageFolderDataModule(folder, "split/class", cache=cache, **arguments).prepare_data()
    no_reading()
    mapped = ImageFolderDataModule(folder, "split/class", cache=cache, **arguments)
    assert isinstance(mapped.samples, MappedSamples)
    assert mapped.samples.nbytes == NUMBER * 8  # the labels
    for client in range(3):
        pairs = [
            list(data.client(client).train_dataloader())
            + list(data.client(client).test_dataloader())
            for data in (memory, mapped)
        ]
        assert len(pairs[0]) > 1
        for one, other in zip(*pairs, strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_celeba_decodes_its_images_once(tmp_path, no_reading):
    folder = tmp_path / "data" / "celeba" / "data" / "raw" / "img_align_celeba"
    folder.mkdir(parents=True)
    for part, value in (("train", 10), ("test", 20)):
        Image.new("RGB", (178, 218), (value,) * 3).save(folder / f"{part}.png")
        write(tmp_path, "celeba", part, {"1": ([f"{part}.png"], [1.0])})
    CelebADataModule(root=tmp_path, cache=tmp_path / "cache").prepare_data()
    no_reading()
    data = CelebADataModule(root=tmp_path, cache=tmp_path / "cache")
    assert isinstance(data.samples, MappedSamples)
    assert data.samples.inputs.amax((1, 2, 3)).tolist() == [10, 20]


def test_mapped_training_and_test_samples_are_joined_without_a_copy(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.uint8).reshape(6, 2))
    whole = np.load(tmp_path / "x.npy", mmap_mode="c")
    train, test = train_and_test(whole, np.arange(6), 4)
    joined = concatenate(train, test)
    assert isinstance(joined, MappedSamples)
    assert joined.inputs.data_ptr() == whole.ctypes.data and joined.inputs.shape == (6, 2)
    assert joined.targets.tolist() == [0, 1, 2, 3, 4, 5]
    apart = concatenate(test, train)  # not adjacent: the order counts
    assert apart.inputs.tolist() == [[8, 9], [10, 11], [0, 1], [2, 3], [4, 5], [6, 7]]
    assert train_and_test(whole, np.arange(6), 6)[1] is None


def test_mapped_samples_stay_on_the_host():
    samples = MappedSamples(torch.ones(3, 2, dtype=torch.uint8), torch.arange(3)).to("meta")
    inputs, targets = samples.gather(torch.tensor([2, 0]))
    assert samples.inputs.device.type == "cpu"
    assert inputs.device.type == targets.device.type == "meta" and inputs.shape == (2, 2)


class Noted(Dataset):
    """Six pairs of a vector and a label; the process that reads an item leaves a file."""

    def __init__(self, folder, shapes=(2, 2)):
        self.folder, self.shapes = folder, shapes

    def __len__(self):
        return 6

    def __getitem__(self, number):
        (self.folder / str(os.getpid())).touch()
        return torch.full((self.shapes[number == 5],), number / 3), number % 2


@pytest.mark.processes
def test_a_data_set_is_read_once_in_worker_processes(tmp_path, workers, one_line):
    (tmp_path / "readers").mkdir()
    streamed = DatasetSamples(Noted(tmp_path / "readers"), [0, 1, 0, 1, 0, 1])
    file = tmp_path / "cache" / "inputs.npy"
    mapped = MappedSamples.read(streamed, file)
    readers = {int(path.name) for path in (tmp_path / "readers").iterdir()}
    assert len(readers) == 2 and os.getpid() not in readers
    MappedSamples.read(streamed, file)
    assert len(list((tmp_path / "readers").iterdir())) == 2
    index = torch.tensor([[5, 0], [2, 2]])
    for one, other in zip(mapped.gather(index), streamed.gather(index), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    ragged = DatasetSamples(Noted(tmp_path / "readers", (2, 3)), [0, 1, 0, 1, 0, 1])
    with one_line("inputs of the items 0 and 5 have the shapes 2 and 3", "of one shape"):
        MappedSamples.read(ragged, tmp_path / "ragged.npy")
    with one_line("DatasetSamples.targets: None; it must be given"):
        MappedSamples.read(DatasetSamples(Noted(tmp_path)), file)


@pytest.mark.parametrize("transforms", [[], [HorizontalFlip()]], ids=["plain", "flipped"])
def test_a_run_with_a_cache_equals_a_run_in_memory(paths, tmp_path, transforms):
    """With and without transforms, which take another way through the engines."""
    rows = []
    for cache in (None, tmp_path / "cache"):
        torch.manual_seed(0)
        data = ImageFolderDataModule(
            tmp_path / "set", "split/class", cache=cache, num_clients=2, transforms=transforms
        )
        method = FedAvg(LogisticRegression(60, 2), lr=0.1)
        rows.append(run(method, data, 2, root=tmp_path, precision=None).trainer.recorder.rows)
    assert len(rows[0]) == 2 and rows[0] == rows[1]
