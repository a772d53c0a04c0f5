"""Image data sets, read by torchvision from small files in the formats of the real files.

A local server stands in for the Internet. Of torchvision only the comparison of checksums is
replaced, as small files cannot have the checksums of the real files.
"""

import functools
import gzip
import http.server
import io
import pickle
import struct
import sys
import tarfile
import threading
import urllib.error
import urllib.request
import zipfile

import numpy as np
import pytest
import scipy.io
import torch
from torchvision import datasets
from torchvision.transforms.functional import to_pil_image

import datamodules
from datamodules import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    ClassesPerClient,
    EMNISTDataModule,
    FashionMNISTDataModule,
    MNISTDataModule,
    SharedTest,
    SVHNDataModule,
    TinyImageNetDataModule,
)
from pfl.cli import main
from pfl.datamodules.sources.vision import ImageDataModule

RNG = np.random.default_rng(0)
TRAIN, TEST = 40, 12


def draw(number, shape, classes):
    """Draws random images, and labels in which every class occurs."""
    images = RNG.integers(0, 256, (number, *shape), np.uint8)
    return images, RNG.permutation(np.arange(number) % classes)


# ---- the formats --------------------------------------------------------------------------------


def idx(array):
    """Returns the content of an idx file of unsigned bytes (yann.lecun.com/exdb/mnist)."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def mnist_files(folder, parts, name="{}-{}-ubyte.gz"):
    for part, (images, labels) in parts.items():
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / name.format(part, kind)).write_bytes(gzip.compress(idx(array)))


def write_mnist(folder):
    train, test = draw(TRAIN, (28, 28), 10), draw(TEST, (28, 28), 10)
    mnist_files(folder, {"train": train, "t10k": test})
    return [(images[:, None], labels) for images, labels in (train, test)]


def write_emnist(folder, split="letters", classes=26, first=1):
    """Writes mirrored images, as in the files of EMNIST; "letters" counts classes from 1."""
    train, test = draw(TRAIN, (28, 28), classes), draw(TEST, (28, 28), classes)
    parts = {
        f"emnist-{split}-{part}": (images.transpose(0, 2, 1), labels + first)
        for part, (images, labels) in (("train", train), ("test", test))
    }
    (folder / "gzip").mkdir()
    mnist_files(folder / "gzip", parts)
    with zipfile.ZipFile(folder / "gzip.zip", "w") as archive:
        for path in (folder / "gzip").iterdir():
            archive.write(path, f"gzip/{path.name}")
    return [(images[:, None], labels) for images, labels in (train, test)]


def write_cifar(folder, archive, inner, batches, key, meta, classes):
    """Writes pickled dictionaries: rows of 3072 bytes, channel by channel, and lists of labels."""
    parts = []
    with tarfile.open(folder / archive, "w:gz") as tar:

        def add(name, content):
            data = pickle.dumps(content)
            info = tarfile.TarInfo(f"{inner}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))

        for name in batches:
            images, labels = draw(TRAIN, (3, 32, 32), classes)
            add(name, {"data": images.reshape(TRAIN, -1), key: labels.tolist()})
            parts.append((images, labels))
        add(meta[0], {meta[1]: [f"class {i}" for i in range(classes)]})
    *train, test = parts
    return [tuple(map(np.concatenate, zip(*train, strict=True))), test]


def write_cifar10(folder):
    batches = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    meta = ("batches.meta", "label_names")
    archive, inner = "cifar-10-python.tar.gz", "cifar-10-batches-py"
    return write_cifar(folder, archive, inner, batches, "labels", meta, 10)


def write_cifar100(folder):
    meta = ("meta", "fine_label_names")
    archive, inner = "cifar-100-python.tar.gz", "cifar-100-python"
    return write_cifar(folder, archive, inner, ["train", "test"], "fine_labels", meta, 40)


def write_svhn(folder):
    """Writes MATLAB files: images [32, 32, 3, N] and labels [N, 1], with the label 10 for 0."""
    parts = []
    for split, number in (("train", TRAIN), ("test", TEST)):
        images, labels = draw(number, (3, 32, 32), 10)
        stored = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
        content = {"X": images.transpose(2, 3, 1, 0), "y": stored}
        scipy.io.savemat(folder / f"{split}_32x32.mat", content)
        parts.append((images, labels))
    return parts


def write_tiny(folder):
    """Writes JPEG files of one colour each, which JPEG keeps up to rounding, by WordNet id."""
    wnids = ["n03", "n01", "n02"]  # the file wnids.txt is not sorted
    sets: list[list] = [[], []]
    with zipfile.ZipFile(folder / "tiny-imagenet-200.zip", "w") as archive:

        def add(name, colour, gray=False):
            image = torch.from_numpy(np.full((64, 64, 3), colour, np.uint8)).permute(2, 0, 1)
            data = io.BytesIO()
            to_pil_image(image[:1] if gray else image).save(data, "JPEG", quality=100)
            archive.writestr(f"tiny-imagenet-200/{name}", data.getvalue())
            return image.numpy()

        archive.writestr("tiny-imagenet-200/wnids.txt", "".join(f"{w}\n" for w in wnids))
        for number, wnid in enumerate(sorted(wnids)):
            for i in range(3):
                gray = i == 1  # some of the real images are gray
                colour = [RNG.integers(256)] * 3 if gray else RNG.integers(0, 256, 3)
                image = add(f"train/{wnid}/images/{wnid}_{i}.JPEG", colour, gray)
                sets[0].append((image, number))
        lines = []
        for i, wnid in enumerate(["n02", "n03", "n01", "n02"]):
            image = add(f"val/images/val_{i}.JPEG", RNG.integers(0, 256, 3))
            sets[1].append((image, sorted(wnids).index(wnid)))
            lines.append(f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n")
        archive.writestr("tiny-imagenet-200/val/val_annotations.txt", "".join(lines))
    return [tuple(map(np.array, zip(*part, strict=True))) for part in sets]


SETS = {
    "MNIST": (MNISTDataModule, write_mnist),
    "FashionMNIST": (FashionMNISTDataModule, write_mnist),
    "EMNIST letters": (functools.partial(EMNISTDataModule, "letters"), write_emnist),
    "EMNIST balanced": (EMNISTDataModule, lambda f: write_emnist(f, "balanced", 12, 0)),
    "CIFAR10": (CIFAR10DataModule, write_cifar10),
    "CIFAR100": (CIFAR100DataModule, write_cifar100),
    "SVHN": (SVHNDataModule, write_svhn),
    "TinyImageNet": (TinyImageNetDataModule, write_tiny),
}


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path, monkeypatch):
    """Debian's files of Fashion-MNIST, if this machine has them, are not used."""
    monkeypatch.setattr(FashionMNISTDataModule, "installed", tmp_path / "nothing")


# ---- the server ---------------------------------------------------------------------------------


@pytest.fixture
def internet(tmp_path, monkeypatch):
    """A folder that is served at all addresses of the data sets, and the list of all requests."""
    folder = tmp_path / "internet"
    folder.mkdir()
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            super().do_GET()

        def log_message(self, *args):
            pass

    handler = functools.partial(Handler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    for name in ("MNIST", "FashionMNIST"):
        monkeypatch.setattr(getattr(datasets, name), "mirrors", [f"{address}/"])
    for name in ("EMNIST", "CIFAR10", "CIFAR100"):
        kind = getattr(datasets, name)
        monkeypatch.setattr(kind, "url", f"{address}/{kind.url.rpartition('/')[2]}")
    addresses = {
        split: [f"{address}/{url.rpartition('/')[2]}", *rest]
        for split, (url, *rest) in datasets.SVHN.split_list.items()
    }
    monkeypatch.setattr(datasets.SVHN, "split_list", addresses)
    monkeypatch.setattr(TinyImageNetDataModule, "source", address)
    monkeypatch.setattr(datasets.utils, "check_md5", lambda path, md5, **kwargs: True)
    yield folder, requests
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def no_internet(monkeypatch):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no network here")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


# ---- tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
def test_data_are_downloaded_once_and_read_as_they_are(name, tmp_path, internet):
    build, write = SETS[name]
    folder, requests = internet
    expected = write(folder)
    dm = build(num_clients=2, root=tmp_path / "data" / "sets", protocol=SharedTest(validation=0))
    assert not requests and not (tmp_path / "data").exists()
    dm.prepare_data()
    assert requests
    for samples, (images, labels) in zip(dm.load()[:2], expected, strict=True):
        assert samples.inputs.dtype == torch.uint8 and samples.targets.dtype == torch.int64
        assert samples.inputs.shape == images.shape
        distance = np.abs(samples.inputs.numpy().astype(int) - images)
        assert distance.max() <= (2 if name == "TinyImageNet" else 0)
        assert samples.targets.tolist() == labels.tolist()

    assert dm.input_shape == expected[0][0].shape[1:]
    assert dm.num_classes == max(labels.max() for _, labels in expected) + 1
    assert dm.client_sizes.sum() == len(expected[0][1])
    assert dm.partition.test.sizes.tolist() == [len(expected[1][1])] * 2
    x, _ = dm.samples.gather(torch.tensor([0]))
    assert x.dtype == torch.float32 and x.max() <= 1
    torch.testing.assert_close(x[0], dm.load().train.inputs[0] / 255)

    del requests[:]
    dm = build(num_clients=2, root=tmp_path / "data" / "sets")
    dm.prepare_data()
    dm.setup()
    assert requests == []


@pytest.mark.parametrize("name", SETS)
def test_archives_of_a_user_need_no_network(name, tmp_path, internet, no_internet):
    build, write = SETS[name]
    served, _ = internet
    expected = write(served)
    dm = build(num_clients=2, root=tmp_path)
    for archive in dm.archives:
        path = tmp_path / archive
        path.parent.mkdir(parents=True, exist_ok=True)
        (served / path.name).rename(path)
    assert len(dm.samples) == sum(len(labels) for _, labels in expected)


@pytest.mark.parametrize("name", SETS)
def test_without_a_network_the_error_names_the_archives_and_the_folder(
    name, tmp_path, no_internet, one_line
):
    dm = SETS[name][0](num_clients=2, root=tmp_path)
    archives = [tmp_path / archive for archive in dm.archives]
    root, names = f"{type(dm).__name__}.root: '{tmp_path}'", [path.name for path in archives]
    place = f"from {dm.source} into {archives[0].parent}"
    with one_line(f"{root} does not hold {dm.title}", "no network here", *names, place):
        dm.prepare_data()
    with one_line(root, dm.files[0], "prepare_data()"):
        dm.setup()


def test_the_address_in_the_error_is_that_of_torchvision():
    """The error of a failed download sends a user to the place from which torchvision downloads."""
    named = (getattr(datamodules, name) for name in datamodules.__all__)
    kinds = [d for d in named if isinstance(d, type)]
    image_sets = [d for d in kinds if issubclass(d, ImageDataModule)]
    assert len(image_sets) == 7
    for dm in image_sets:
        if dm is not TinyImageNetDataModule:
            stored = getattr(datasets, dm.title)
            if "url" in vars(stored):
                urls = [stored.url]
            elif "split_list" in vars(stored):
                urls = [url for url, *_ in stored.split_list.values()]
            else:
                urls = [m + "x" for m in stored.mirrors]
            assert dm.source in [url.rpartition("/")[0] for url in urls]


def test_files_with_other_checksums_are_refused(tmp_path, no_internet, one_line):
    """Here torchvision's comparison of checksums is not replaced."""
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "test", "meta"):
        (folder / name).write_bytes(pickle.dumps({"data": [], "fine_labels": []}))
    dm = CIFAR100DataModule(num_clients=2, root=tmp_path)
    with one_line(f"CIFAR100DataModule.root: '{tmp_path}'", "cannot be read", "remove the files"):
        dm.setup()


def test_damaged_files_are_refused(tmp_path, internet, one_line):
    write_mnist(internet[0])
    dm = MNISTDataModule(num_clients=2, root=tmp_path)
    dm.prepare_data()
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03")
    with one_line("MNIST", "cannot be read"):
        dm.setup()


def test_an_interrupted_download_is_continued(tmp_path, internet):
    """The images of Tiny ImageNet are decoded again if decoding was not finished."""
    write_tiny(internet[0])
    dm = TinyImageNetDataModule(num_clients=2, root=tmp_path)
    dm.prepare_data()
    before = dm.load().test
    inside = {path.name for path in (tmp_path / "tiny-imagenet-200").iterdir()}
    assert not [name for name in inside if "partial" in name]
    assert {path.name for path in tmp_path.glob("tiny*")} == {*dm.archives, "tiny-imagenet-200"}
    (tmp_path / "tiny-imagenet-200" / "val_labels.npy").unlink()
    del internet[1][:]
    dm.prepare_data()
    assert internet[1] == []  # the folder is complete
    assert torch.equal(dm.load().test.targets, before.targets)
    assert torch.equal(dm.load().test.inputs, before.inputs)


def test_train_samples_are_drawn_by_the_seed(tmp_path, internet, one_line):
    images, labels = write_mnist(internet[0])[0]
    build = functools.partial(
        MNISTDataModule, num_clients=5, root=tmp_path, protocol=SharedTest(validation=0)
    )

    def chosen(**arguments):
        dm = build(**arguments)
        dm.prepare_data()
        train = dm.load().train
        rows = [int(np.flatnonzero((images == x.numpy()).all((1, 2, 3)))[0]) for x in train.inputs]
        assert labels[rows].tolist() == train.targets.tolist()
        return rows

    some = chosen(train_samples=15)
    assert len(set(some)) == 15 and sorted(some) == some  # different samples, in ascending order
    assert some == chosen(train_samples=15) != chosen(train_samples=15, seed=1)
    assert chosen(train_samples=TRAIN) == chosen() == list(range(TRAIN))
    dm = build(train_samples=15)
    assert dm.client_sizes.tolist() == [3] * 5 and dm.partition.test.sizes[0] == TEST
    assert dm.describe().startswith("15 training samples only, 5 clients,")
    assert build().describe().startswith("5 clients,")
    with one_line("MNISTDataModule.train_samples: 0; it must be a whole number of at least 1"):
        build(train_samples=0)
    with one_line("MNISTDataModule.train_samples: 1.5; it must be a whole number"):
        build(train_samples=1.5)
    with one_line("MNISTDataModule.train_samples: 41; it must be at most 40"):
        build(train_samples=41).setup()


def test_an_unknown_emnist_split_is_refused(one_line):
    with one_line("EMNISTDataModule.split: 'letter'", "letters, digits"):
        EMNISTDataModule("letter", num_clients=2)


def test_a_tilde_in_root_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert MNISTDataModule(root="~/data").root == tmp_path / "data"


@pytest.mark.cli
def test_the_command_line_downloads_trains_and_tests(tmp_path, internet, monkeypatch, capsys):
    write_emnist(internet[0])
    monkeypatch.setattr(sys, "argv", ["pfl"])
    config = tmp_path / "emnist.yaml"
    config.write_text(f"""
trainer: {{name: emnist, max_epochs: 1, accelerator: cpu, default_root_dir: {tmp_path}}}
model:
  class_path: FedAvg
  init_args:
    network:
      class_path: LogisticRegression
      init_args: {{in_features: 784, num_classes: 26}}
data:
  class_path: EMNISTDataModule
  init_args:
    split: letters
    root: {tmp_path / "data"}
    num_clients: 4
    protocol: {{class_path: SharedTest, init_args: {{validation: 0}}}}
    partition: {{class_path: ClassesPerClient, init_args: {{classes: 7}}}}
""")
    assert main(["fit", "--config", str(config)]) == 0
    assert "test accuracy" in capsys.readouterr().out
    assert main(["fit", "--config", str(config), "--data.split=letter"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "letter" in error and "byclass" in error


def test_classes_per_client_uses_the_labels_of_images(tmp_path, internet):
    write_cifar10(internet[0])
    dm = CIFAR10DataModule(4, ClassesPerClient(5), SharedTest(validation=0), root=tmp_path)
    assert (dm.label_counts("train") > 0).sum(1).tolist() == [5] * 4


def test_the_files_of_debians_package_are_used_without_a_download(tmp_path, monkeypatch):
    installed = tmp_path / "installed"
    installed.mkdir()
    (images, labels), (test, _) = write_mnist(installed)
    monkeypatch.setattr(FashionMNISTDataModule, "installed", installed)
    data = FashionMNISTDataModule(num_clients=2, root=tmp_path / "root")
    data.prepare_data()
    data.setup()
    inputs, targets = data.samples.gather(torch.arange(len(images)))
    assert np.array_equal((255 * inputs).round().numpy(), images)
    assert targets.tolist() == labels.tolist()
    assert len(data.samples) == len(images) + len(test)
