"""The recipes of the papers: every run of every grid can be built, and fits its data."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import Namespace
from torch import nn
from torchvision.transforms.functional import to_pil_image

import datamodules
from datamodules import IID, Dirichlet, LeafDataModule
from pfl.configuration.app import FederatedCLI
from pfl.datamodules.sources.vision import ImageDataModule
from pfl.experiments import Comparison, Reproduction, Tuning
from tests.leaf_files import images, write

ROOT = Path(__file__).parents[2]
PAPERS = ROOT / "configs" / "papers"
pytestmark = pytest.mark.cli
RECIPES = {f"{p.parent.name}-{p.stem}": p for p in sorted(PAPERS.rglob("*.yaml"))}
TABLES = [name for name in RECIPES if "-table" in name]

# Shape of an image, number of classes, training and test images of each class. MNIST's classes are
# not quite equal; that does not matter here.
DATA = {
    "MNIST": ((1, 28, 28), 10, 6000, 1000),
    "FashionMNIST": ((1, 28, 28), 10, 6000, 1000),
    "EMNIST letters": ((1, 28, 28), 26, 4800, 800),
    "EMNIST balanced": ((1, 28, 28), 47, 2400, 400),
    "CIFAR10": ((3, 32, 32), 10, 5000, 1000),
    "CIFAR100": ((3, 32, 32), 100, 500, 100),
    "TinyImageNet": ((3, 64, 64), 200, 500, 50),
}
# Data sets whose files LEAF's scripts write: shape of an image, or words of a text; number of
# classes; clients.
LEAF = {
    "FEMNISTDataModule": ((1, 28, 28), 62, 90),
    "CelebADataModule": ((3, 84, 84), 2, 100),
    "Sent140DataModule": ((25,), 2, 100),
}
TWEET = ["1", "Mon Jun 01", "NO_QUERY", "someone", "so cool", "training"]
METRICS = {
    *(f"test/{kind}/accuracy" for kind in ("global", "personalized")),
    *(f"comm/{way}_bytes" for way in ("uplink", "downlink")),
    *(f"parameters/{kind}" for kind in ("global", "personalized")),
}


def configurations(name):
    """Returns the different configurations of `fit` in a recipe, with and without `--full`."""
    configs = {}
    for job in (
        job for full in (False, True) for job in Reproduction.from_file(name, full=full).jobs()
    ):
        config = {k: v for k, v in job.config.items() if k != "seed_everything"}
        configs.setdefault(json.dumps(config), (job, config))
    return configs


def chosen(name):
    """Yields every run at one point of the grid, and every point of the grid with one run.

    Those of the recipe on which this one is based are left out.
    """
    base = yaml.safe_load(RECIPES[name].read_text()).get("base")
    shared, seen = configurations(base) if base else {}, set()
    for key, (job, config) in configurations(name).items():
        if key not in shared and {job.run, str(job.axes)} - seen:
            seen |= {job.run, str(job.axes)}
            yield config


def kind(dm):
    """Returns the key of a datamodule in DATA."""
    return f"EMNIST {dm.split}" if dm.title == "EMNIST" else dm.title


@pytest.fixture(scope="module")
def cli():
    """A command line whose parser is used again and again, and which runs nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederatedCLI, "run_subcommand", lambda self, subcommand: None)
        yield FederatedCLI(["fit", "--config", str(ROOT / "configs" / "quickstart.yaml")])


def parse(cli, config):
    """Returns a configuration as the command line parses it."""
    return cli.subcommand_parser.parse_object(deepcopy(config))  # it changes lists in place


@pytest.fixture(scope="module")
def build(cli):
    """A function that parses and instantiates a configuration, with one parser for all."""
    with pytest.MonkeyPatch.context() as patch:
        for initialize in ("kaiming_normal_", "kaiming_uniform_"):  # slow, and not needed here
            patch.setattr(nn.init, initialize, lambda tensor, *args, **kwargs: tensor)

        def built(config):
            parsed = parse(cli, config)
            cli.config = Namespace(subcommand="fit", fit=parsed)
            cli.before_instantiate_classes()
            cli.instantiate_classes()
            return cli

        yield built


@pytest.fixture
def labels_only(monkeypatch):
    """Gives the image data sets their numbers of labels and channels, and images of one pixel."""

    def read(self, train):
        shape, classes, *per_class = DATA[kind(self)]
        labels = torch.arange(classes).repeat_interleave(per_class[0 if train else 1])
        return torch.zeros(len(labels), shape[0], 1, 1, dtype=torch.uint8), labels

    for cls in (getattr(datamodules, name) for name in datamodules.__all__):
        if isinstance(cls, type) and issubclass(cls, ImageDataModule):
            monkeypatch.setattr(cls, "read", read)
    monkeypatch.setattr(ImageDataModule, "_missing_files", lambda self: [])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Small files of LEAF where the recipes expect them, in the current folder."""
    folder = tmp_path_factory.mktemp("recipes")
    leaf = folder / "data" / "leaf"
    for part in ("train", "test"):
        write(leaf, "femnist", part, {f"f{i:04}": (images(i), [i % 62]) for i in range(110)})
        write(leaf, "celeba", part, {str(i): (["1.png"], [float(i % 2)]) for i in range(100)})
        write(leaf, "sent140", part, {str(i): ([TWEET] * 25, [0] * 25) for i in range(100)})
    faces = leaf / "data" / "celeba" / "data" / "raw" / "img_align_celeba"
    faces.mkdir(parents=True)
    to_pil_image(torch.zeros(3, 218, 178)).save(faces / "1.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def test_every_table_of_the_papers_has_a_recipe():
    tables = {"fedslr": range(1, 10), "fedclup": (2, 4), "fedagg": (3, 5, 6), "fedacs": (1, 2)}
    expected = {f"{paper}-table{number}" for paper in tables for number in tables[paper]}
    assert expected == set(TABLES)


PROTOCOLS = sorted((ROOT / "configs" / "results").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("path", PROTOCOLS, ids=lambda path: path.stem)
def test_every_protocol_has_options_that_there_are(path, cli, monkeypatch):
    """One run of each of its rows; the values and the data are not looked at."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    keys = yaml.safe_load(path.read_text()).keys()
    kind = Comparison
    if "tune" in keys:
        kind = Tuning
    if keys & {"panels", "tables", "base"}:
        kind = Reproduction
    jobs = {job.run: job for job in kind.from_file(path).jobs()}
    for job in jobs.values():
        assert parse(cli, job.config).model.class_path


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.usefixtures("files")
def test_every_run_can_be_built_and_its_data_partitioned(name, build, labels_only):
    seen = set()
    for config in chosen(name):
        cli = build(config)
        assert cli.trainer.max_epochs == config["trainer"]["max_epochs"]
        assert type(cli.model).__name__ == config["model"]["class_path"].rpartition(".")[2]
        network, loop = config["model"]["init_args"]["network"], cli.datamodule
        if isinstance(loop.datamodule, LeafDataModule):
            shape, classes, clients = LEAF[type(loop.datamodule).__name__]
            inputs = torch.zeros(2, *shape, dtype=torch.int64 if len(shape) == 1 else torch.float32)
            assert cli.model.network(inputs).shape == (2, classes)
            if new(seen, config["data"]):
                loop.setup()
                assert (loop.datamodule.input_shape, loop.datamodule.num_clients) == (
                    shape,
                    clients,
                )
        if not isinstance(loop.datamodule, ImageDataModule):
            continue
        if new(seen, network, config["data"]["class_path"]):
            check_network(cli.model.network, loop.datamodule)
        if new(seen, config["data"], config.get("loop")):
            loop.setup()
            check_partition(name, loop.datamodule)


def new(seen, *what):
    """Returns whether `what` is new, and remembers it."""
    before = len(seen)
    seen.add(json.dumps(what))
    return len(seen) > before


def check_network(network, data):
    shape, classes, *_ = DATA[kind(data)]
    assert network(torch.zeros(2, *shape)).shape == (2, classes)


def check_partition(name, data):
    """Checks that every client has samples to train on and to be tested on."""
    parts, changes = data.partition, [type(t).__name__ for t in data.transforms.transforms]
    expected = {
        "fedslr": ["Normalize", "HorizontalFlip", "RandomCrop"],
        "fedagg": ["Normalize"],
        "fedacs": ["Normalize"],
        "fedclup": [],
    }
    assert changes == expected[name.partition("-")[0]]
    assert parts.train.sizes.min() > 0 and parts.test.sizes.min() > 0
    assert parts.val.sizes.sum() == 0  # none of these papers holds samples back
    if name.startswith("fedslr"):  # "all clients have equal n_i"
        normalize, _, crop = data.transforms.transforms
        assert (normalize.mean[0], crop.padding, crop.probability) == {
            "CIFAR10": (0.491, 4, 0.5),  # read in the paper's code, utils_dataset.py
            "CIFAR100": (0.5071, 4, 0.5),
            "TinyImageNet": (0.5, 8, 0.5),
        }[data.title]
        _, classes, per_class, _ = DATA[kind(data)]
        size = classes * per_class // 100
        assert (data.client_sizes == size).all()
        # The paper's code draws label distributions q from Dir(0.1, ..., 0.1), of which the mean of
        # sum_k q_k^2 is (1 + 0.1) / (1 + 0.1 K); here the mean is that of 100 clients.
        expected = 1 / classes if isinstance(data.partitioner, IID) else 1.1 / (1 + 0.1 * classes)
        counts = data.label_counts("train")
        pairs = (counts * (counts - 1)).sum(1) / (size * (size - 1))  # without bias
        assert pairs.mean() == pytest.approx(expected, rel=0.2)
    if name.startswith("fedacs") and data.train_samples is not None:
        assert (data.client_sizes == 50).all()
    if name in ("fedacs-table1", "fedacs-table2"):  # "we sample 50 data points" for each of 100
        assert (data.train_samples, data.num_clients) == (5000, 100)
    if name == "fedagg-table3" and isinstance(data.partitioner, Dirichlet):
        assert data.partitioner.over == "labels"  # Hsu et al., whom the paper cites
    if name == "fedclup-table4":
        assert data.client_sizes.sum() == 10 * 200
        counts = (data.label_counts("train") > 0).sum(1)
        assert (counts == data.partitioner.classes).all()


@pytest.mark.parametrize("name", TABLES)
def test_every_table_shows_metrics_that_runs_have(name):
    tables = Reproduction.from_file(name).written  # it checks that each run has a place
    shown = {metric for table in tables for y in table.panel.y for metric in y.split(" + ")}
    assert shown <= METRICS
    assert len({table.panel.title for table in tables}) == len(tables)
