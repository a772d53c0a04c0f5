"""What clients train and are evaluated on where the data module has transforms."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from datamodules import (
    ClientInversion,
    ClientNoise,
    DatasetSamples,
    FederatedDataModule,
    HorizontalFlip,
    Loaded,
    LogNormal,
    Normalize,
    RandomCrop,
    SharedTest,
    SplitOwn,
    TensorDataModule,
    TensorSamples,
)
from models import MLP
from pfl.algorithms import FedAvg
from pfl.clients import ClientData, Clients, LocalSchedule, view
from tests.commands import QUICKSTART, TWO_PROCESSES, call, finish, table
from tests.draws import client_key, uniform_of
from tests.networks import put
from tests.problems import History, run

RNG = np.random.default_rng(4)
NUMBER, CLIENTS = 90, 6
IMAGES = RNG.integers(0, 256, (NUMBER, 1, 4, 4), np.uint8)
LABELS = np.arange(NUMBER) % 3
CHANGES = (ClientInversion(), ClientNoise(0.2), RandomCrop(2), HorizontalFlip(), Normalize())


def data(transforms=CHANGES, protocol=None, targets=LABELS, **kwargs):
    return TensorDataModule(
        IMAGES[:70],
        targets[:70],
        IMAGES[70:],
        targets[70:],
        num_clients=CLIENTS,
        partition=LogNormal(0.6, min_size=4),
        protocol=protocol or SplitOwn(0.3, 0.1),
        transforms=transforms,
        **kwargs,
    )


def visits(clients, schedule):
    """For each client, what it sees in each step: the samples' numbers, and their images."""
    seen = {int(i): [] for i in clients.ids}
    for batch in clients.batches(schedule):
        for row, count in enumerate(batch.counts):
            own = batch.targets[row, :count].tolist(), batch.inputs[row, :count].clone()
            seen[int(clients.ids[row])].append(own)
    return seen


def equal(one, other):
    """Whether two clients' visits show the same images, to the last bit."""
    pairs = list(zip(one, other, strict=True))
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


def by_size(module):
    return np.argsort(-module.client_sizes, kind="stable")


NUMBERED = np.arange(NUMBER)  # the target of a sample is its number


@pytest.mark.parametrize("batch_size", [3, None])
def test_a_training_image_is_a_function_of_seed_client_round_epoch_and_sample(
    batch_size, monkeypatch
):
    schedule = LocalSchedule(batch_size, epochs=3)
    module = data(targets=NUMBERED)
    samples = ClientData(module, seed=5)
    together = visits(Clients(by_size(module), 2, samples), schedule)

    for client in range(CLIENTS):  # not of the other clients of the group,
        alone = visits(Clients(np.array([client]), 2, samples), schedule)
        assert equal(alone[client], together[client])
    monkeypatch.setattr(view, "READ_AHEAD", 1)  # nor of how many steps are gathered at a time,
    again = visits(
        Clients(by_size(module), 2, ClientData(data(targets=NUMBERED), seed=5)), schedule
    )
    for client in range(CLIENTS):
        assert equal(again[client], together[client])

    def images(seen, epoch):
        """The images of one epoch by the number of the sample."""
        steps = seen[int(by_size(module)[0])]
        steps = steps[epoch * len(steps) // 3 : (epoch + 1) * len(steps) // 3]
        return {n: x for numbers, inputs in steps for n, x in zip(numbers, inputs, strict=True)}

    def share(one, other):
        assert one.keys() == other.keys() and len(one) > 10
        return np.mean([torch.equal(one[n], other[n]) for n in one])

    first = images(together, 0)
    # nor of the batch that the sample is in
    assert (
        share(first, images(visits(Clients(by_size(module), 2, samples), LocalSchedule(5, 3)), 0))
        == 1
    )
    # There are 25 crops and two flips: another epoch, round, purpose or seed repeats few of them.
    assert share(first, images(together, 1)) < 0.5
    others = [
        (Clients(by_size(module), 3, samples), schedule),
        (Clients(by_size(module), 2, samples), LocalSchedule(batch_size, 3, purpose="other")),
        (Clients(by_size(module), 2, ClientData(module, seed=6)), schedule),
    ]
    for clients, other in others:
        assert share(first, images(visits(clients, other), 0)) < 0.5


def test_streamed_samples_are_transformed_like_those_in_memory():
    class Streamed(FederatedDataModule):
        def load(self):
            pairs = [(torch.from_numpy(x), int(y)) for x, y in zip(IMAGES, NUMBERED, strict=True)]
            return Loaded(DatasetSamples(pairs, NUMBERED))

    transforms = (ClientNoise(0.2), RandomCrop(1), Normalize([0.5], [0.25]))
    arguments = {"num_clients": 4, "transforms": transforms}
    modules = Streamed(**arguments), TensorDataModule(IMAGES, NUMBERED, **arguments)
    seen = [
        visits(Clients(by_size(m), 0, ClientData(m)), LocalSchedule(4, epochs=2)) for m in modules
    ]
    assert all(equal(seen[0][client], seen[1][client]) for client in range(4))
    module = Streamed(num_clients=4, transforms=[Normalize()])
    with pytest.raises(ValueError, match=r"Normalize.mean: None; it must be given.*streamed"):
        module.setup()


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_evaluation_shifts_and_normalizes_but_never_augments(split):
    """Each client sees what the transforms without crops and flips make of its own samples."""
    module, plain = data(targets=NUMBERED), data((), targets=NUMBERED)
    # Crops and flips keep their places: the keys of the draws depend on these.
    still = (ClientInversion(), ClientNoise(0.2), HorizontalFlip(0), HorizontalFlip(0), Normalize())
    shifts = data(still, targets=NUMBERED)
    sizes = getattr(module.partition, split).sizes
    clients = Clients(np.argsort(-sizes, kind="stable"), 1, ClientData(module, seed=5), split)
    seen: dict[int, list] = {int(i): [] for i in clients.ids}
    for rows, batch in clients.samples(2):
        for row, client in enumerate(clients.ids[rows]):
            seen[int(client)] += batch.inputs[row, : batch.counts[row]]
    pooled: dict[int, list] = {int(i): [] for i in clients.ids}
    for owners, index in clients.pooled(7):
        inputs, _ = clients.data.gather(index, torch.float32, clients.ids[owners])
        for owner, image in zip(clients.ids[owners], inputs, strict=True):
            pooled[int(owner)].append(image)
    for client in range(CLIENTS):
        own = torch.from_numpy(getattr(plain.partition, split)[client])
        owners = torch.full((len(own),), client)
        expected = shifts.transforms(plain.samples.gather(own)[0], owners, own)
        for images in (seen[client], pooled[client]):
            assert torch.equal(torch.stack(images), expected)


def test_clients_with_shifts_have_scores_of_their_own_on_a_shared_test_set(tmp_path):
    torch.manual_seed(0)
    module = data([ClientInversion(0.5)], SharedTest())
    network = nn.Sequential(nn.Flatten(), MLP(16, (5,), 3))
    algorithm = FedAvg(network, lr=0.3, batch_size=8)
    run(algorithm, module, 2, root=tmp_path)
    x, y = torch.from_numpy(IMAGES[70:]).double() / 255, torch.from_numpy(LABELS[70:])
    inverted = [uniform_of(client_key(client, 0)) < 0.5 for client in range(CLIENTS)]
    assert 0 < sum(inverted) < CLIENTS
    with torch.no_grad():
        model = put(algorithm.network, algorithm.global_model).eval()
        losses = [F.cross_entropy(model(1 - x if i else x), y).item() for i in inverted]
    got = algorithm.evaluation.scores["test", "global"]
    np.testing.assert_allclose(got["loss"], losses, rtol=1e-6)  # images are float32 at first


def trained(root, engine, at_once):
    torch.manual_seed(0)
    history = History()
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3))
    algorithm = FedAvg(network, lr=0.3, batch_size=4, local_epochs=2, engine=engine)
    run(algorithm, data(), 2, root=root, callbacks=[history], clients_at_once=at_once)
    return history["w"], algorithm.evaluation.scores["test", "global"]["loss"]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("together"), "sequential", CLIENTS)


@pytest.mark.parametrize("engine", ["auto", "vmap", "sequential"])
@pytest.mark.parametrize("at_once", [None, 1])
def test_runs_with_transforms_do_not_depend_on_engines_and_chunks(
    tmp_path, together, engine, at_once
):
    for one, other in zip(together, trained(tmp_path, engine, at_once), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.cli
@pytest.mark.processes
def test_runs_with_transforms_do_not_depend_on_processes_and_resuming(tmp_path):
    """In float64; two processes add the clients' models up in another order."""
    shown = "[ClientNoise, RandomCrop, HorizontalFlip, Normalize]"
    options = ["--model=FedAvg", "--trainer.precision=64-true", "--trainer.callbacks=[]"]
    options += ["--trainer.accelerator=cpu", f"--data.transforms={shown}", "--model.lr=0.05"]

    def fit(name, *others, config=QUICKSTART, apart=False):
        command = ["fit", "--config", config, "--trainer.name", name, *others]
        command += ["--trainer.default_root_dir", tmp_path]
        if apart:
            finish("-m", "pfl", *command, cwd=tmp_path)
        else:
            status, _, error = call(*command)
            assert status == 0, error
        rows = table(tmp_path / name / "metrics.csv")
        columns = [name for name in rows[0] if "loss" in name or "accuracy" in name]
        assert len(columns) > 10
        return np.array([[float(row[name]) for name in columns] for row in rows])

    whole = fit("whole", *options, "--trainer.max_epochs=2")
    half = fit("half", *options, "--trainer.max_epochs=1")
    point = tmp_path / "half" / "checkpoints" / "last.ckpt"
    config = tmp_path / "half" / "config.yaml"
    resumed = fit("half", "--trainer.max_epochs=2", "--ckpt_path", point, config=config)
    assert len(half) == 1 and np.array_equal(resumed, whole)
    two = fit("two", *options, "--trainer.max_epochs=2", *TWO_PROCESSES, apart=True)
    np.testing.assert_allclose(two, whole, rtol=1e-10)


def test_data_without_transforms_are_gathered_from_the_store():
    """No copy is made: the blocks of steps hold the data set itself."""
    module = data(())
    samples = ClientData(module)
    for block in Clients(by_size(module), 0, samples).step_blocks(LocalSchedule(4)):
        assert isinstance(samples.samples, TensorSamples)
        assert block.inputs is samples.samples.inputs
        assert block.inputs.dtype == torch.uint8
