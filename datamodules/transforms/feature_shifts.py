"""Transforms that make the images of clients differ, in training and in evaluation alike.

What a client's images look like is a function of the data module's seed, the client and the sample:
the same in every round, and for training, validation and test samples.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import require_value
from ..randomness import choice, normal, uniform
from ..ranges import NonNegative, Share
from ..samples.samples import Samples
from .transform import Draws, Transform, check_images


class ClientRotation(Transform):
    """Rotates the images of each client by an angle that is drawn once for the client.

    Multiples of 90 degrees are exact for square images; other angles are interpolated bilinearly.
    Corners that were outside of the image are zero. Four quarter turns are the Rotated MNIST of
    Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning",
    NeurIPS 2020; there each angle has equally many clients. Here it is drawn from `angles`
    (degrees, counterclockwise), which are equally likely.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> data = DigitsDataModule(num_clients=4, transforms=[ClientRotation([0, 180])])
        >>> data.describe().endswith("transforms ClientRotation(angles=[0.0, 180.0]).")
        True
    """

    per_client = True

    def __init__(self, angles: Sequence[float] = (0, 90, 180, 270)) -> None:
        holds = len(angles) > 0 and all(math.isfinite(angle) for angle in angles)
        require_value(
            "ClientRotation.angles", angles, holds, "one or more finite numbers of degrees"
        )
        self.angles = [float(angle) for angle in angles]

    def __call__(self, inputs: Tensor, draws: Draws) -> Tensor:
        check_images(self, inputs)
        height, width = inputs.shape[2:]
        tables = _rotations(tuple(self.angles), height, width)
        places, shares = (table.to(inputs.device, non_blocking=True) for table in tables)
        angle = choice(draws.client, len(self.angles))
        pixels = nn.functional.pad(inputs.flatten(2), (0, 1))  # the last one: 0, all outside
        rotated = torch.zeros_like(inputs.flatten(2))
        for place, share in zip(places, shares, strict=True):
            index = place[angle][:, None].expand_as(rotated)
            rotated += pixels.gather(2, index) * share[angle][:, None].to(inputs.dtype)
        return rotated.view_as(inputs)


class ClientInversion(Transform):
    """Inverts the images of a client with the probability `share`: x in [0, 1] becomes 1 - x.

    Example:
        >>> ClientInversion(share=0.25)
        ClientInversion(share=0.25)
    """

    per_client = True

    def __init__(self, share: Share = 0.5) -> None:
        self.share = share

    def __call__(self, inputs: Tensor, draws: Draws) -> Tensor:
        check_images(self, inputs)
        inverted = uniform(draws.client) < self.share
        return torch.where(inverted[:, None, None, None], 1 - inputs, inputs)


class ClientBlur(Transform):
    """Blurs the images of each client with a Gaussian whose width is drawn once for the client.

    The widths `sigmas` (standard deviations in pixels) are equally likely; 0 leaves images as they
    are. The Gaussian is cut off at three times the largest width. Pixels at the border are repeated
    outwards.

    Example:
        >>> ClientBlur([0, 1, 2])
        ClientBlur(sigmas=[0.0, 1.0, 2.0])
    """

    per_client = True

    def __init__(self, sigmas: Sequence[float] = (0, 1)) -> None:
        holds = len(sigmas) > 0 and all(0 <= sigma < math.inf for sigma in sigmas)
        require_value(
            "ClientBlur.sigmas", sigmas, holds, "one or more finite numbers of at least 0"
        )
        self.sigmas = [float(sigma) for sigma in sigmas]

    def __call__(self, inputs: Tensor, draws: Draws) -> Tensor:
        check_images(self, inputs)
        kernels = _gaussians(tuple(self.sigmas)).to(inputs.dtype)
        kernels = kernels.to(inputs.device, non_blocking=True)
        kernel = kernels[choice(draws.client, len(self.sigmas))]  # [n, 2 r + 1]
        radius = kernel.shape[1] // 2
        for axis, pad in ((2, (0, 0, radius, radius)), (3, (radius, radius, 0, 0))):
            padded = nn.functional.pad(inputs, pad, mode="replicate")
            # Sums of shifted images instead of a convolution, whose rounding depends on the batch.
            blurred = torch.zeros_like(inputs)
            for place in range(2 * radius + 1):
                window = padded.narrow(axis, place, inputs.shape[axis])
                blurred += window * kernel[:, place, None, None, None]
            inputs = blurred
        return inputs


class ClientColour(Transform):
    """Changes contrast and brightness of each channel by amounts drawn once for the client.

    A value x of a channel becomes a x + b, limited to [0, 1], with a uniform in [1 - s, 1 + s] and
    b uniform in [-s, s] for the `strength` s.

    Example:
        >>> ClientColour(strength=0.2)
        ClientColour(strength=0.2)
    """

    per_client = True

    def __init__(self, strength: Share = 0.3) -> None:
        self.strength = strength

    def __call__(self, inputs: Tensor, draws: Draws) -> Tensor:
        check_images(self, inputs)
        channels = inputs.shape[1]
        drawn = [uniform(draws.client, number) for number in range(2 * channels)]
        change = (torch.stack(drawn, 1) * 2 - 1) * self.strength
        factor, shift = change.to(inputs.dtype)[:, :, None, None].split(channels, 1)
        return (inputs * (1 + factor)).add_(shift).clamp_(0, 1)


class ClientNoise(Transform):
    """Adds Gaussian noise to the inputs, whose variance grows with the number of the client.

    The "noise-based feature imbalance" of Li, Diao, Chen, He, "Federated Learning on Non-IID Data
    Silos: An Experimental Study", ICDE 2022 (NIID-Bench): client i of M, counted from 1, has the
    variance `level` i / M, with 0.1 in the paper. The noise of a sample is drawn once, and values
    are not limited to [0, 1]. The paper's code differs: `level` i / (M - 1), with i counted from 0,
    is the standard deviation there, and the noise is drawn anew whenever a sample is read.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> data = DigitsDataModule(num_clients=5, transforms=[ClientNoise(0.2)])
        >>> bool((next(iter(data.client(4).test_dataloader()))[0] < 0).any())
        True
    """

    per_client = True

    def __init__(self, level: NonNegative = 0.1) -> None:
        self.level = level
        self._num_clients: int | None = None

    def bound(self, train: Samples, num_clients: int) -> "ClientNoise":
        result = ClientNoise(self.level)
        result._num_clients = num_clients
        return result

    def __call__(self, inputs: Tensor, draws: Draws) -> Tensor:
        assert self._num_clients is not None
        variance = (draws.clients + 1).double() * (self.level / self._num_clients)
        noise = normal(draws.sample, inputs[0].numel()).to(inputs.dtype)
        scale = variance.sqrt().to(inputs.dtype)[:, None]
        return inputs + noise.mul_(scale).view_as(inputs)


@lru_cache
def _rotations(angles: tuple[float, ...], height: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns from which pixels a rotation takes each pixel, and their shares, for J angles.

    Places are int64 [k, J, H W], where H W is outside of the image, shares float32 [k, J, H W]. k
    is 4, the corners of a bilinear interpolation, or less where all other shares are zero.
    """
    row, column = np.divmod(np.arange(height * width), width)
    up = (height - 1) / 2 - row
    right = column - (width - 1) / 2
    radians = np.deg2rad(angles)[:, None]
    # Rounded, so that quarter turns hit pixels exactly.
    cos = np.cos(radians).round(12)
    sin = np.sin(radians).round(12)
    columns = (cos * right + sin * up + (width - 1) / 2).round(9)
    rows = ((height - 1) / 2 + sin * right - cos * up).round(9)
    top = np.floor(rows)
    left = np.floor(columns)
    corners: list[tuple[Any, Any]] = []
    for down, across in ((0, 0), (0, 1), (1, 0), (1, 1)):
        r = top + down
        c = left + across
        share = (1 - np.abs(rows - r)) * (1 - np.abs(columns - c))
        inside = (r >= 0) & (r < height) & (c >= 0) & (c < width)
        if (share * inside).any():
            place = np.where(inside, r * width + c, height * width)
            corners.append((place.astype(np.int64), share.astype(np.float32)))
    places, shares = (torch.from_numpy(np.stack(x)) for x in zip(*corners, strict=True))
    return places, shares


@lru_cache
def _gaussians(sigmas: tuple[float, ...]) -> Tensor:
    """Returns the weights of one-dimensional Gaussians, float64 [J, 2 r + 1]; each sums to 1."""
    radius = math.ceil(3 * max(sigmas))
    distance = torch.arange(-radius, radius + 1, dtype=torch.float64)
    widths = torch.tensor(sigmas, dtype=torch.float64)[:, None]
    weights = torch.where(
        widths > 0, (-0.5 * (distance / widths.clamp_min(1e-9)) ** 2).exp(), distance == 0
    )
    return weights / weights.sum(1, keepdim=True)
