"""Transforms of whole batches: normalization, and random crops and flips in training.

The module `feature_shifts` has those that make the images of clients differ.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError, require_value
from ..partitions.index_arrays import IndexArrays
from ..randomness import choice, fold, uniform
from ..ranges import Checked, Count, Share
from ..samples.samples import Samples, TensorSamples, are_scaled, check_finite

_BLOCK = 1 << 22  # values that are converted to float64 at a time
_TRIED = 64  # samples on which transforms are tried when the data are loaded


class Draws(NamedTuple):
    """The clients of n inputs, and the keys of all that a transform draws for them, int64 [n].

    The keys differ between the transforms of a list. A key is the same whichever other inputs are
    in the batch, so random numbers that are functions of keys do not depend on the batch.

    Attributes:
        clients: Ids of the clients that hold the inputs.
        client: Keys of (seed, client).
        sample: Keys of (seed, client, sample).
        visit: Keys of (seed, purpose, round, client, epoch, sample); None in evaluation.

    Example:
        >>> keys = torch.tensor([3, 3, 4])
        >>> Draws(torch.tensor([0, 0, 1]), client=keys, sample=keys, visit=None).clients
        tensor([0, 0, 1])
    """

    clients: Tensor
    client: Tensor
    sample: Tensor
    visit: Tensor | None


class Transform(Checked, ABC):
    """A change of inputs that is made batch by batch, when the samples are gathered.

    A subclass implements `__call__`. Its result for an input must not depend on the other inputs of
    the batch, to the last bit: it should use elementwise operations and indexing, and take random
    numbers from `uniform` and `choice`.

    Attributes:
        per_client: Whether clients that share a sample see it differently.

    Example:
        >>> class Darken(Transform):
        ...     def __call__(self, inputs, draws):
        ...         return inputs / 2
        >>> from pfl.datamodules import TensorDataModule
        >>> data = TensorDataModule(torch.ones(9, 1, 4, 4), torch.zeros(9), num_clients=3,
        ...                         transforms=[Darken()])
        >>> next(iter(data.client(0).train_dataloader()))[0].max()
        tensor(0.5000)
    """

    per_client = False

    def bound(self, train: Samples, num_clients: int) -> "Transform":
        """Returns the transform with what it takes from the training samples and M."""
        return self

    def bound_to_clients(self, samples: Samples, trained: IndexArrays) -> "Transform":
        """Returns the transform with what it takes from the samples that each client trains on."""
        return self

    @abstractmethod
    def __call__(self, inputs: Tensor, draws: Draws) -> Tensor:
        """Returns the changed inputs, [n, ...], which must not be changed in place.

        Inputs are floating; images [n, C, H, W] are in [0, 1] at first.
        """

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if k[0] != "_")
        return f"{type(self).__name__}({arguments})"


class Normalize(Transform):
    """Subtracts the mean of each channel and divides by the standard deviation.

    Without `mean` and `std`, numbers for each channel, these are statistics of the data set's
    training samples: of all pixels of a channel, scaled to [0, 1], or of each column of a table.
    They are computed when the data are loaded, and the record of a run states them. A constant
    channel is divided by 1. Streamed data have no statistics.

    Where clients split their own samples, the data set's training samples contain those that
    clients are tested on. `of="trained"` leaves these out. `of="client"` takes for each client the
    statistics of the samples that it trains on, so that no number of one client reaches another; a
    client that trains on none gets those of all clients.

    Args:
        mean, std: Numbers for each channel; None computes them.
        of: Whose statistics: of "all" training samples of the data set, of those that clients
            "trained" on, or of those of each "client".

    Example:
        >>> from pfl.datamodules import TensorDataModule
        >>> inputs = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
        >>> data = TensorDataModule(inputs, torch.zeros(2), num_clients=1, transforms=[Normalize()])
        >>> data.transforms
        Pipeline(Normalize(mean=[2.0, 5.0], std=[1.0, 0.0]))
    """

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        of: Literal["all", "trained", "client"] = "all",
    ) -> None:
        require_value("Normalize.of", of, mean is None or of == "all", "all, as mean is given")
        self._of = of
        self.mean = None
        self.std = None
        if mean is not None:
            self.mean = [float(value) for value in mean]
        if std is not None:
            self.std = [float(value) for value in std]
        if self.mean is not None or self.std is not None:
            sizes = [len(values or ()) for values in (self.mean, self.std)]
            matches = sizes[0] == sizes[1] > 0
            require_value(
                "Normalize.std", std, matches, f"as many numbers as mean, which is {mean}"
            )
        finite = self.std is None or all(0 < value < np.inf for value in self.std)
        require_value("Normalize.std", std, finite, "positive and finite numbers")

    def bound(self, train: Samples, num_clients: int) -> "Normalize":
        shape = tuple(train.input_shape)
        require_value(
            "Normalize: the inputs' shape", shape, bool(shape), "(C, ...), with C channels"
        )
        channels = shape[0]
        if self.mean is not None:
            expected = f"{channels} numbers, one per channel of the inputs"
            require_value("Normalize.mean", self.mean, len(self.mean) == channels, expected)
            return self
        expected = "given, with std, as the samples are streamed"
        require_value("Normalize.mean", None, isinstance(train, TensorSamples), expected)
        assert isinstance(train, TensorSamples)
        if self._of != "all":
            return self  # the numbers come in `bound_to_clients`
        result = Normalize()
        result.mean, result.std = channel_statistics(train.inputs)
        return result

    def bound_to_clients(self, samples: Samples, trained: IndexArrays) -> Transform:
        if self._of == "all":
            return self
        assert isinstance(samples, TensorSamples)
        result = Normalize()
        everyone = np.unique(trained.flat)
        result.mean, result.std = channel_statistics(samples.inputs[everyone])
        if self._of == "trained":
            return result
        rows = []
        for client in range(len(trained)):
            own = (result.mean, result.std)
            if trained.sizes[client]:
                own = channel_statistics(samples.inputs[trained[client]])
            rows.append(own)
        return NormalizeByClient(rows)

    def __repr__(self) -> str:
        if self._of == "all":
            return super().__repr__()
        return f"Normalize(of={self._of!r})"

    def __call__(self, inputs: Tensor, draws: Draws) -> Tensor:
        assert self.mean is not None and self.std is not None
        shape = (-1, *[1] * (inputs.ndim - 2))
        values = [self.mean, [value or 1.0 for value in self.std]]
        statistics = torch.tensor(values, dtype=inputs.dtype)
        mean, std = statistics.to(inputs.device, non_blocking=True).view(2, *shape)
        return (inputs - mean).div_(std)


class NormalizeByClient(Transform):
    """Subtracts the mean of each channel of a client and divides by its standard deviation.

    `Normalize(of="client")` becomes such a transform when the data are loaded.

    Args:
        statistics: Means and standard deviations of each client.
    """

    per_client = True

    def __init__(self, statistics: Sequence[tuple[list[float], list[float]]]) -> None:
        self._statistics = list(statistics)
        self._mean = torch.tensor([mean for mean, _ in statistics], dtype=torch.float64)
        std = torch.tensor([std for _, std in statistics], dtype=torch.float64)
        self._std = torch.where(std == 0, 1.0, std)

    def of_client(self, client: int) -> Normalize:
        """Returns the normalization of one client."""
        result = Normalize()
        result.mean, result.std = self._statistics[client]
        return result

    def __call__(self, inputs: Tensor, draws: Draws) -> Tensor:
        shape = (len(inputs), -1, *[1] * (inputs.ndim - 2))
        clients = draws.clients.to(inputs.device)
        mean = self._mean.to(inputs.device, inputs.dtype)[clients].view(shape)
        std = self._std.to(inputs.device, inputs.dtype)[clients].view(shape)
        return (inputs - mean).div_(std)

    def __repr__(self) -> str:
        return "Normalize(of='client')"


class TimeFirst(Transform):
    """Makes [n, W, F] of windows of a series [n, F, W], as recurrent networks take them.

    It comes after `Normalize`, which takes the second axis for the columns.

    Example:
        >>> from pfl.datamodules import TensorDataModule
        >>> data = TensorDataModule(torch.ones(9, 2, 24), torch.zeros(9), num_clients=1,
        ...                         transforms=[TimeFirst()])
        >>> data.input_shape
        torch.Size([24, 2])
    """

    def __call__(self, inputs: Tensor, draws: Draws) -> Tensor:
        key = "TimeFirst: the inputs' shape"
        expected = "(n, F, W), windows of a series"
        require_value(key, tuple(inputs.shape), inputs.ndim == 3, expected)
        return inputs.transpose(1, 2)


class RandomCrop(Transform):
    """Moves each image by a random number of pixels in training; what moves in is zero.

    The image is padded on all sides and a random window of its own size is cut out, anew for each
    visit of a sample (Krizhevsky, 2009; He et al., CVPR 2016 pad CIFAR-10 by 4). Zero is black
    before `Normalize`, and the mean after it.

    Args:
        padding: Pixels on each side, p; the shifts are from -p to p in each direction.
        probability: The probability that an image is moved at all, from 0 to 1.

    Example:
        >>> RandomCrop(padding=2)
        RandomCrop(padding=2, probability=1.0)
    """

    def __init__(self, padding: Count = 4, probability: Share = 1.0) -> None:
        self.padding = int(padding)
        self.probability = probability

    def __call__(self, inputs: Tensor, draws: Draws) -> Tensor:
        check_images(self, inputs)
        if draws.visit is None:
            return inputs
        p = self.padding
        height, width = inputs.shape[2:]
        moved = uniform(draws.visit, 2) < self.probability
        shifts = (choice(draws.visit, 2 * p + 1, number) for number in (0, 1))
        down, right = (torch.where(moved, shift, p) for shift in shifts)
        windows = nn.functional.pad(inputs, [p] * 4).unfold(2, height, 1).unfold(3, width, 1)
        return windows[torch.arange(len(inputs), device=inputs.device), :, down, right]


class HorizontalFlip(Transform):
    """Mirrors each image with a probability in training, anew for each visit of a sample.

    Example:
        >>> HorizontalFlip()
        HorizontalFlip(probability=0.5)
    """

    def __init__(self, probability: Share = 0.5) -> None:
        self.probability = probability

    def __call__(self, inputs: Tensor, draws: Draws) -> Tensor:
        check_images(self, inputs)
        if draws.visit is None:
            return inputs
        flipped = uniform(draws.visit) < self.probability
        return torch.where(flipped[:, None, None, None], inputs.flip(-1), inputs)


class Apply(Transform):
    """Calls a module without randomness on whole batches, such as one of torchvision's `v2`.

    In a configuration file, with any transform of `torchvision.transforms.v2` that draws nothing:

        transforms:
          - class_path: Apply
            init_args:
              module: {class_path: torchvision.transforms.v2.Resize, init_args: {size: 32}}

    It is applied in training and in evaluation alike. A module that draws random numbers is
    refused, as these would depend on the rest of the batch.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> data = DigitsDataModule(transforms=[Apply(torch.nn.Upsample(scale_factor=4))])
        >>> data.input_shape
        torch.Size([1, 32, 32])
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def bound(self, train: Samples, num_clients: int) -> "Apply":
        before = torch.get_rng_state()
        self.module(train.gather(torch.zeros(2, dtype=torch.int64))[0])
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            name = type(self.module).__name__
            raise ConfigError(
                f"Apply.module: {name}; it must draw no random numbers, as RandomCrop and "
                "HorizontalFlip do from keys of their own"
            )
        return self

    def __call__(self, inputs: Tensor, draws: Draws) -> Tensor:
        return self.module(inputs)


class Pipeline:
    """The transforms of a data module, applied one after another to gathered samples.

    Example:
        >>> from pfl.datamodules import HorizontalFlip
        >>> pipeline, images = Pipeline([HorizontalFlip(1.0)]), torch.rand(2, 1, 4, 4)
        >>> owners, samples = torch.tensor([7, 7]), torch.tensor([0, 1])
        >>> torch.equal(pipeline(images, owners, samples), images)  # no augmentation
        True
        >>> visits = torch.tensor([5, 5])  # keys of the visits: this is training
        >>> torch.equal(pipeline(images, owners, samples, visits), images.flip(-1))
        True
    """

    def __init__(self, transforms: Sequence[Transform] = (), seed: int = 0) -> None:
        self.transforms = list(transforms)
        self._seed = seed

    @property
    def per_client(self) -> bool:
        """Whether clients that share a sample see it differently."""
        return any(transform.per_client for transform in self.transforms)

    def bound(
        self,
        train: Samples,
        num_clients: int,
        samples: Samples | None = None,
        trained: IndexArrays | None = None,
    ) -> "Pipeline":
        """Returns the pipeline with what its transforms take from the data, and tries it out.

        Args:
            train: The training samples of the data set.
            num_clients: The number of clients.
            samples: All samples, and
            trained: The samples that each client trains on, for transforms of clients.

        Raises:
            ConfigError: A transform does not fit the data.
        """
        if not self.transforms:
            return self
        index = torch.linspace(0, len(train) - 1, min(len(train), _TRIED)).long()
        some = train.gather(index)[0]
        kind = str(some.dtype)
        expected = "floating, or uint8 images, where transforms are given"
        require_value("inputs.dtype", kind, some.is_floating_point(), expected)
        bound = [transform.bound(train, num_clients) for transform in self.transforms]
        if samples is not None and trained is not None:
            bound = [transform.bound_to_clients(samples, trained) for transform in bound]
        result = Pipeline(bound, self._seed)
        for visits in (None, torch.zeros(1, dtype=torch.int64)):  # as in evaluation, as in training
            result._try_out(some, index, visits)
        return result

    def _try_out(self, inputs: Tensor, samples: Tensor, visits: Tensor | None) -> None:
        """Refuses results that are not finite, or that the second half of the inputs has otherwise.

        Raises:
            ConfigError: A transform gives such a result.
        """
        client = torch.zeros(1, dtype=torch.int64)
        together: list[Tensor] = []
        half = len(samples) // 2

        def keep(name: str, result: Tensor) -> None:
            check_finite(name, result)
            together.append(result[half:].to(torch.float64, copy=True))

        def compare(name: str, result: Tensor) -> None:
            expected = together.pop(0)
            # Convolutions may round otherwise in a smaller batch.
            room = 1e-3 * float(expected.abs().amax())
            if not torch.allclose(result.double(), expected, rtol=0, atol=room):
                raise ConfigError(
                    f"{name} for an input differs from call to call, or with the other inputs of "
                    f"the batch; it must depend on the input and its `draws` only: draw with "
                    f"`uniform` or `choice` from `draws`, as ClientNoise does"
                )

        self(inputs.clone(), client, samples, visits, check=keep)
        self(inputs[half:].clone(), client, samples[half:], visits, check=compare)

    def __call__(
        self,
        inputs: Tensor,
        clients: Tensor,
        samples: Tensor,
        visits: Tensor | None = None,
        check: Callable[[str, Tensor], None] | None = None,
    ) -> Tensor:
        """Returns the transformed inputs, [n, ...].

        Args:
            inputs: Floating inputs [n, ...], as `Samples.gather` returns them.
            clients: The client of each input, int64, of a shape that broadcasts to `samples`.
            samples: The index of each input in the data set, integers of n elements.
            visits: In training, keys of (seed, purpose, round, client, epoch), like `clients`; None
                in evaluation.
            check: Is called with the name and the result of each transform.
        """
        index = samples.reshape(-1).long()
        ids = clients.expand(samples.shape).reshape(-1)
        seen = None
        if visits is not None:
            seen = fold(visits.expand(samples.shape).reshape(-1), index)
        for number, transform in enumerate(self.transforms):
            # One key per transform, so that two of them draw independent numbers.
            client = fold(torch.full_like(ids, self._seed), torch.full_like(ids, number))
            client = fold(client, ids)
            visit = None
            if seen is not None:
                visit = fold(seen, torch.full_like(seen, number))
            inputs = transform(inputs, Draws(ids, client, fold(client, index), visit))
            name = f"transforms: the result of {type(transform).__name__}"
            shape = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
            if not isinstance(inputs, Tensor) or shape[:1] != (len(index),):
                raise ConfigError(
                    f"{name} for {len(index)} inputs is {shape}; it must be a tensor "
                    f"({len(index)}, ...)"
                )
            if check is not None:
                check(name, inputs)
        return inputs

    def __bool__(self) -> bool:
        return bool(self.transforms)

    def __repr__(self) -> str:
        return f"Pipeline({', '.join(map(repr, self.transforms))})"


def channel_statistics(inputs: Tensor) -> tuple[list[float], list[float]]:
    """Returns the mean and the standard deviation of each channel, rounded as by `_rounded`.

    Args:
        inputs: [N, C, ...]; uint8 images are scaled to [0, 1].
    """
    values = inputs.flatten(2) if inputs.ndim > 2 else inputs.unsqueeze(2)
    scale = 1
    if are_scaled(inputs):
        scale = 255
    sums = np.zeros((2, values.shape[1]))
    count = values.shape[0] * values.shape[2]
    step = max(1, _BLOCK // max(1, values[0].numel()))
    # Differences to one of the values are exactly 0 in a constant channel.
    offset = values[0, :, 0].double().numpy() / scale
    for block in values.split(step):
        x = block.numpy().astype(np.float64) / scale - offset[:, None]
        sums += x.sum((0, 2)), (x * x).sum((0, 2))
    mean, square = sums / count
    std = np.sqrt(np.maximum(square - mean**2, 0))
    means = [_rounded(*pair) for pair in zip(mean + offset, std, strict=True)]
    return means, [_rounded(value, value) for value in std]


def _rounded(value: float, std: float) -> float:
    """Returns a mean, or the deviation, with four digits, which absorb the order of its summation.

    A mean of latitudes or of times in seconds, which four digits would move by more than a quarter
    of the standard deviation, has nine digits, as float32 has.
    """
    rounded = float(f"{value:.4g}")
    limit = max(std / 4, float(np.finfo(np.float32).eps) * abs(value))
    if abs(rounded - value) > limit:
        return float(f"{value:.9g}")
    return rounded


def check_images(transform: Transform, inputs: Tensor) -> None:
    """Raises a ConfigError unless inputs are images [n, C, H, W]."""
    key = f"{type(transform).__name__}: the inputs' shape"
    shape = tuple(inputs.shape)
    require_value(key, shape, inputs.ndim == 4, "(n, C, H, W), images")
