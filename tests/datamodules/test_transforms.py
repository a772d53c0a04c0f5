"""Transforms of gathered batches: what they compute, and that no result depends on the batch."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from datamodules import (
    IID,
    Apply,
    ClientBlur,
    ClientColour,
    ClientInversion,
    ClientNoise,
    ClientRotation,
    DigitsDataModule,
    Draws,
    HorizontalFlip,
    Normalize,
    RandomCrop,
    Sampled,
    SharedTest,
    SplitOwn,
    TensorDataModule,
    Transform,
)
from pfl.datamodules.randomness import choice, normal, uniform
from tests.device import DEVICE, OtherDevice
from tests.draws import (
    CLIENTS,
    IMAGES,
    INDEX,
    OWNERS,
    VISITS,
    N,
    bound,
    choice_of,
    mixed,
    uniform_of,
    visit_key,
)

TRANSFORMS = {
    "Normalize": Normalize(),
    "RandomCrop": RandomCrop(2),
    "HorizontalFlip": HorizontalFlip(),
    "Apply": Apply(v2.Resize([5, 6])),
    "quarter turns": ClientRotation(),
    "rotation": ClientRotation([-20, 0, 33]),
    "ClientInversion": ClientInversion(),
    "ClientBlur": ClientBlur([0, 0.7, 1.3]),
    "ClientColour": ClientColour(),
    "ClientNoise": ClientNoise(),
}


# ---- draws ---------------------------------------------------------------------------------------


def test_draws_are_functions_of_the_key_alone():
    keys = torch.tensor([0, 1, -1, 2**62, -(2**63)])
    plain = [key % 2**64 for key in keys.tolist()]
    for number in (0, 3):
        assert uniform(keys, number).tolist() == [uniform_of(k, number) for k in plain]
        assert choice(keys, 7, number).tolist() == [choice_of(k, 7, number) for k in plain]
    # 16 bits each are the rank of a quantile; the lowest come first.
    words = np.array([[mixed(k, word) for word in range(2)] for k in plain], np.uint64)
    ranks = words.view(np.int16).astype(int) + 32768
    shares = torch.from_numpy((ranks[:, :7] + 0.5) / 65536)
    assert torch.equal(normal(keys, 7), torch.special.ndtri(shares).float())


def test_normal_numbers_have_the_moments_of_the_normal_distribution():
    # All 65,536 quantiles are equally likely. They are symmetric, and what is cut off at 4.2
    # standard deviations, where the density is 5e-5, lowers the variance by less than 1e-3.
    values = torch.special.ndtri((torch.arange(65536).double() + 0.5) / 65536)
    assert float(values.sum()) == pytest.approx(0, abs=1e-6)
    assert 0.999 < float(values.square().mean()) < 1
    # 40,000 draws: five standard errors of the mean are 5 / 200, of the variance 5 sqrt(2) / 200.
    drawn = normal(torch.arange(40), 1000)
    assert abs(float(drawn.mean())) < 0.025
    assert float(drawn.square().mean()) == pytest.approx(1, abs=0.0354)


# ---- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_result_does_not_depend_on_the_rest_of_the_batch(name, dtype, training):
    """To the last bit: alone, in any order, in other memory, and after any other call."""
    images = IMAGES.to(dtype)
    pipeline = bound(TRANSFORMS[name], images=images)

    def apply(rows):
        visits = VISITS[rows] if training else None
        return pipeline(images[rows], OWNERS[rows], INDEX[rows], visits)

    before = images.clone()
    everyone = apply(torch.arange(N))
    assert everyone.dtype == dtype
    assert torch.equal(images, before)  # nothing is changed in place
    order = torch.from_numpy(np.random.default_rng(1).permutation(N))
    assert torch.equal(apply(order), everyone[order])
    for size in (1, 5, 16):
        parts = torch.cat([apply(rows) for rows in torch.arange(N).split(size)])
        assert torch.equal(parts, everyone)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_another_device_gives_the_same_images_and_is_not_waited_for(name):
    pipeline = bound(TRANSFORMS[name])
    given = IMAGES, OWNERS, INDEX, VISITS
    with OtherDevice() as device:
        moved = [tensor.to(DEVICE) for tensor in given]
        before = len(device.waits)
        seen = pipeline(*moved)
        assert device.waits[before:] == []
        assert seen.device == DEVICE
        assert torch.equal(seen.cpu(), pipeline(*given))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_only_crops_and_flips_differ_between_visits(name):
    pipeline = bound(TRANSFORMS[name])
    seen = [pipeline(IMAGES, OWNERS, INDEX, visits) for visits in (None, VISITS, VISITS + 50)]
    same = torch.equal(seen[0], seen[1]) and torch.equal(seen[1], seen[2])
    assert same == (name not in ("RandomCrop", "HorizontalFlip"))
    if not same:
        assert torch.equal(seen[0], IMAGES)  # evaluation does not augment


@pytest.mark.parametrize("name", TRANSFORMS)
def test_clients_see_a_sample_differently_where_the_transform_says_so(name):
    pipeline = bound(TRANSFORMS[name])
    one = IMAGES[:1].expand(CLIENTS, -1, -1, -1)
    seen = pipeline(one, torch.arange(CLIENTS), torch.zeros(CLIENTS, dtype=torch.int64))
    assert pipeline.per_client == bool((seen != seen[:1]).any())


def test_the_same_transform_draws_anew_at_each_place_of_the_list():
    once = bound(RandomCrop(3))(IMAGES, OWNERS, INDEX, VISITS)
    second = bound(HorizontalFlip(0.0), RandomCrop(3))(IMAGES, OWNERS, INDEX, VISITS)
    assert not torch.equal(once, second)
    other_seed = bound(ClientNoise(), seed=1)(IMAGES, OWNERS, INDEX)
    assert not torch.equal(bound(ClientNoise())(IMAGES, OWNERS, INDEX), other_seed)


# ---- normalization -------------------------------------------------------------------------------


def test_normalize_uses_the_statistics_of_the_training_images():
    images = np.random.default_rng(2).integers(0, 200, (20, 3, 4, 4), np.uint8)
    images[:, 2] = 51  # constant, 0.2: divided by 1
    data = TensorDataModule(
        images[:15], np.arange(15) % 2, images[15:] + 50, np.arange(5) % 2, num_clients=1,
        partition=IID(), protocol=SharedTest(validation=0.0), transforms=[Normalize()],
    )  # fmt: skip
    x = images[:15].astype(np.float64) / 255
    mean, std = x.mean((0, 2, 3)), x.std((0, 2, 3))
    std[2] = 0  # but for NumPy's rounding
    mean, std = ([float(f"{v:.4g}") for v in values] for values in (mean, std))
    shown = f"Normalize(mean={mean}, std={std})"
    assert str(data.transforms) == f"Pipeline({shown})"
    assert "; seed 0; " in data.describe() and data.describe().endswith(f"; transforms {shown}.")
    (inputs, _), *_ = data.client(0).test_dataloader()
    scale = np.where(np.array(std) > 0, std, 1)[:, None, None]
    expected = ((images[15:] + 50) / 255 - np.array(mean)[:, None, None]) / scale
    np.testing.assert_allclose(inputs.numpy(), expected, atol=2e-6)
    (inputs, _), *_ = data.test_dataloader()
    np.testing.assert_allclose(inputs.numpy(), expected, atol=2e-6)


def test_the_columns_of_a_table_are_normalized_one_by_one():
    x = np.random.default_rng(3).normal(1e3, [1e-3, 5, 200], (400, 3))
    data = TensorDataModule(
        x, np.zeros(400), num_clients=1, protocol=SplitOwn(0.0, 0.0), transforms=[Normalize()],
        batch_size=None,
    )  # fmt: skip
    (inputs, _), *_ = data.train_dataloader()
    # Mean and standard deviation have four digits. The rounded mean of 1000 leaves up to 0.5,
    # where the deviation is 200.
    assert data.transforms.transforms[0].std == [float(f"{s:.4g}") for s in x.std(0)]
    np.testing.assert_allclose(inputs.std(0, correction=0), 1, rtol=1e-3)
    np.testing.assert_allclose(inputs[:, 2].mean(), 0, atol=0.5 / 200 + 1e-5)


def test_a_mean_far_from_zero_is_as_exact_as_its_deviation_needs():
    """Seconds of a day in 2023, latitudes in a city, and a constant column."""
    rows = np.arange(101.0)  # their mean is 50, their variance (101^2 - 1) / 12 = 850
    x = np.stack([1.7e9 + 864 * rows, 52.51634 + 1e-4 * (rows - 50), 0 * rows + 12_345], 1)
    data = TensorDataModule(
        x, np.zeros(101), num_clients=1, protocol=SplitOwn(0.0, 0.0), transforms=[Normalize()],
        batch_size=None,
    )  # fmt: skip
    inputs = data.dataset(0).batch(list(range(101)))[0]
    z = (rows - 50) / np.sqrt(850)
    expected = np.stack([z, z, 0 * rows], 1)
    np.testing.assert_allclose(inputs, expected, atol=2e-3)  # the deviation has four digits


def test_given_statistics_are_used_as_they_are():
    expected = (IMAGES.double() - 0.25) / torch.tensor([1.0, 2, 4])[:, None, None]
    seen = bound(Normalize([0.25] * 3, [1, 2, 4]))(IMAGES, OWNERS, INDEX)
    torch.testing.assert_close(seen.double(), expected, atol=1e-7, rtol=0)


# ---- augmentation --------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [1.0, 0.6])
def test_crops_are_windows_of_the_padded_image(probability):
    p = 2
    crop = RandomCrop(p, probability)
    seen = bound(Normalize([0] * 3, [1] * 3), crop)(IMAGES, OWNERS, INDEX, VISITS)
    shifts = set()
    for i in range(N):
        down, right = (choice_of(visit_key(i, 1), 2 * p + 1, number) for number in (0, 1))
        if uniform_of(visit_key(i, 1), 2) >= probability:
            down, right = p, p
        expected = np.zeros((3, 7, 9), np.float32)
        for row in range(7):
            for column in range(9):
                r, c = row + down - p, column + right - p
                if 0 <= r < 7 and 0 <= c < 9:
                    expected[:, row, column] = IMAGES[i, :, r, c]
        assert np.array_equal(seen[i], expected)
        shifts.add((down, right))
    assert {down for down, _ in shifts} == {right for _, right in shifts} == set(range(5))


@pytest.mark.parametrize(("probability", "share"), [(0.0, 0), (1.0, 1), (0.3, None)])
def test_flips_have_their_probability(probability, share):
    seen = bound(HorizontalFlip(probability))(IMAGES, OWNERS, INDEX, VISITS)
    flipped = [uniform_of(visit_key(i, 0)) < probability for i in range(N)]
    for i in range(N):
        expected = IMAGES[i].numpy()[:, :, ::-1] if flipped[i] else IMAGES[i].numpy()
        assert np.array_equal(seen[i], expected)
    assert share is None or np.mean(flipped) == share
    assert share is not None or 0 < sum(flipped) < N


# ---- data modules --------------------------------------------------------------------------------


class Seen(Transform):
    """Keeps the draws that it is called with."""

    def __init__(self):
        self.calls: list[Draws] = []

    def __call__(self, inputs, draws):
        self.calls.append(draws)
        return inputs


def test_loaders_augment_training_samples_in_every_epoch_anew():
    def images(loader):
        """The training images in the order of the samples, by their targets."""
        batches = list(loader)
        order = torch.cat([targets for _, targets in batches]).argsort()
        return torch.cat([inputs for inputs, _ in batches])[order]

    def build(batch_size=4):
        return TensorDataModule(
            IMAGES, torch.arange(N), num_clients=3, partition=IID(), batch_size=batch_size,
            transforms=[HorizontalFlip(), RandomCrop(1)],
        )  # fmt: skip

    data, own = build(), build().partition.train[2]
    for loaders in (
        [d.client(2).train_dataloader() for d in (data, build(), build(7))],
        [d.train_dataloader() for d in (data, build(), build(7))],
    ):
        epochs = [[images(loader) for _ in range(3)] for loader in loaders]
        assert all(map(torch.equal, epochs[0], epochs[1]))  # a function of seed and epoch,
        assert all(map(torch.equal, epochs[0], epochs[2]))  # not of the size of the batches
        assert not torch.equal(epochs[0][0], epochs[0][1])
        loaders[1].sampler.set_epoch(1)
        assert torch.equal(images(loaders[1]), epochs[0][1])
    for split in ("val", "test"):
        loader = getattr(data.client(2), f"{split}_dataloader")()
        expected = IMAGES[torch.from_numpy(getattr(data.partition, split)[2])]
        assert torch.equal(images(loader), expected)
    selection = data.client(2).train_dataloader().dataset
    assert [int(y) for _, y in selection] == own.tolist()  # iteration ends
    assert torch.equal(selection[-1][0], selection[len(own) - 1][0])


def test_loaders_of_all_clients_show_a_sample_as_its_owner_sees_it():
    data = TensorDataModule(
        IMAGES, torch.arange(N), num_clients=4, partition=IID(), transforms=[ClientNoise()],
        protocol=SplitOwn(0.3, 0.0), batch_size=None,
    )  # fmt: skip
    (inputs, targets), *_ = data.test_dataloader()
    for client in range(4):
        (own, labels), *_ = data.client(client).test_dataloader()
        rows = torch.searchsorted(targets, labels)
        assert torch.equal(inputs[rows], own)
    seen = Seen()
    shared = TensorDataModule(
        IMAGES, torch.arange(N), num_clients=40, partition=Sampled(10), transforms=[seen]
    )
    arrays = shared.partition.train
    for _, targets in shared.train_dataloader():
        first = [min(c for c in range(40) if s in arrays[c]) for s in targets.tolist()]
        assert seen.calls[-1].clients.tolist() == first


def test_shapes_and_descriptions_follow_the_transforms():
    data = DigitsDataModule(transforms=[Apply(v2.Resize([12, 10])), RandomCrop(1)])
    assert data.input_shape == (1, 12, 10)
    inputs, _ = next(iter(data.client(0).train_dataloader()))
    assert inputs.shape[1:] == (1, 12, 10)
    assert "transforms" not in DigitsDataModule().describe()
    assert not DigitsDataModule().transforms and data.transforms


def test_the_transform_of_the_document_erases_training_images_only():
    text = (Path(__file__).parents[2] / "docs" / "reference" / "datamodules.md").read_text()
    block, _ = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict = {}
    exec(block, names)
    client = names["data"].client(0)
    images = torch.cat([inputs for inputs, _ in client.train_dataloader()])
    erased = (images == 0).flatten(1).all(1)
    assert 0 < erased.sum() < len(erased)
    images = torch.cat([inputs for inputs, _ in client.test_dataloader()])
    assert not (images == 0).flatten(1).all(1).any()


def test_transforms_do_not_move_partitions():
    plain, shifted = DigitsDataModule(), DigitsDataModule(transforms=[ClientNoise()])
    assert plain.partition.hash == shifted.partition.hash


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (lambda: Normalize(mean=[0.5]), ["Normalize.std: None; it must be as many numbers as"]),
        (lambda: Normalize(std=[0.5]), ["Normalize.std: [0.5]", "mean, which is None"]),
        (lambda: Normalize([0.5], [0.0]), ["Normalize.std: [0.0]; it must be positive"]),
        (lambda: RandomCrop(0), ["RandomCrop.padding: 0"]),
        (lambda: RandomCrop(1, 2), ["RandomCrop.probability: 2; it must be from 0 to 1"]),
        (lambda: HorizontalFlip(1.5), ["HorizontalFlip.probability: 1.5; it must be from 0 to 1"]),
        (lambda: ClientRotation([]), ["ClientRotation.angles: []"]),
        (lambda: ClientRotation([math.inf]), ["ClientRotation.angles: [inf]"]),
        (lambda: ClientInversion(-0.1), ["ClientInversion.share: -0.1"]),
        (lambda: ClientBlur([-1]), ["ClientBlur.sigmas: [-1]"]),
        (lambda: ClientColour(2), ["ClientColour.strength: 2"]),
        (lambda: ClientNoise(math.nan), ["ClientNoise.level: nan"]),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(build, parts, one_line):
    with one_line(*parts):
        build()


def test_other_things_than_transforms_are_refused(one_line):
    with one_line("DigitsDataModule.transforms: 0; it must be a list of Transforms"):
        DigitsDataModule(transforms=[0])


@pytest.mark.parametrize("given", [Normalize(), Normalize, "Normalize", 3])
def test_one_transform_that_is_not_in_a_list_is_refused(given, one_line):
    with one_line(f"DigitsDataModule.transforms: {given!r}; it must be a list of Transforms"):
        DigitsDataModule(transforms=given)


def test_transforms_that_can_be_read_once_are_all_kept():
    data = DigitsDataModule(transforms=(one for one in [Normalize(), HorizontalFlip()]))
    assert len(data.transforms.transforms) == 2


@pytest.mark.parametrize(
    ("inputs", "transform", "parts"),
    [
        (torch.rand(8, 3), RandomCrop(), ["RandomCrop: the inputs' shape: (8, 3)", "images"]),
        (torch.rand(8, 3), ClientRotation(), ["ClientRotation: the inputs' shape"]),
        (torch.arange(8).view(4, 2), Normalize(), ["inputs.dtype: 'torch.int64'", "floating"]),
        (torch.rand(8, 3), Normalize([0.0], [1.0]), ["Normalize.mean: [0.0]; it must be 3"]),
        (torch.rand(8), Normalize(), ["Normalize: the inputs' shape: ()"]),
        (torch.rand(8, 1, 4, 4), Apply(v2.RandomVerticalFlip()), ["RandomVerticalFlip", "draw"]),
    ],
)  # fmt: skip
def test_data_that_do_not_fit_are_refused_before_any_training(inputs, transform, parts, one_line):
    data = TensorDataModule(inputs, torch.zeros(len(inputs)), num_clients=1, transforms=[transform])
    with one_line(*parts):
        data.setup()


class Broken(Transform):
    """A transform that calls a function."""

    def __init__(self, function):
        self.function = function

    def __call__(self, inputs, draws):
        return self.function(inputs, draws.visit is not None)


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (lambda x, training: None, ["for 5 inputs is NoneType; it must be a tensor (5, ...)"]),
        (lambda x, training: x[1:], ["for 5 inputs is (4, 2); it must be a tensor (5, ...)"]),
        (lambda x, training: x.log(), ["NaN or infinite values", "in 2 of 5 samples"]),
        (lambda x, training: None if training else x, ["NoneType"]),
    ],
)
def test_a_transform_is_blamed_for_its_result_before_training(function, parts, one_line):
    inputs = torch.tensor([[1.0, 2], [0, 1], [3, 1], [1, -1], [4, 4]])  # log: rows 1 and 3
    data = TensorDataModule(
        inputs,
        torch.zeros(5),
        num_clients=1,
        transforms=[Normalize([0, 0], [1, 1]), Broken(function)],
    )
    with one_line("transforms: the result of Broken", *parts):
        data.setup()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, training: x + torch.randn_like(x),
        lambda x, training: x + torch.from_numpy(np.random.default_rng().normal(size=x.shape)),
        lambda x, training: x + training * torch.rand(len(x), 1),
        lambda x, training: x - x.mean(0),
    ],
    ids=["torch", "NumPy", "in training", "statistics of the batch"],
)
@pytest.mark.parametrize("count", [2, 9])
def test_draws_that_are_no_functions_of_keys_and_mixed_samples_are_refused(
    function, count, one_line
):
    inputs = torch.arange(2.0 * count).view(count, 2)
    data = TensorDataModule(
        inputs, torch.zeros(count), num_clients=1, transforms=[Broken(function)]
    )
    with one_line("transforms: the result of Broken", "differs from call to call"):
        data.setup()


def test_a_transform_may_change_what_it_is_given():
    data = TensorDataModule(
        torch.ones(4, 2),
        torch.zeros(4),
        num_clients=1,
        transforms=[Broken(lambda x, training: x.mul_(2)), Broken(lambda x, training: x.add_(1))],
    )
    inputs, _ = next(iter(data.client(0).train_dataloader()))
    assert inputs[0].tolist() == [3.0, 3.0]
