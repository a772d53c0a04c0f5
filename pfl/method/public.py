"""A public data set: inputs without labels, which the server and all clients have."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pfl.clients import ClientData, LocalSchedule
from pfl.clients.view import StepOrigin
from pfl.datamodules import FederatedDataModule
from pfl.engines.batch import Batch
from pfl.errors import ConfigError
from pfl.method.hooks import Method
from pfl.randomness import generator, key


class PublicSamples:
    """The inputs of the training samples of all clients of a data module; targets are not read.

    They are no part of a method's state: whoever has the arguments of the method has them.

    Args:
        data: The data module, perhaps with one client.
        count: How many inputs a round uses, or all if there are fewer.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> public = PublicSamples(DigitsDataModule(num_clients=1), count=50)
        >>> public.size, public.inputs(0, 0, torch.zeros(1)).shape
        (50, torch.Size([50, 1, 8, 8]))
    """

    def __init__(self, data: FederatedDataModule, count: int) -> None:
        self._data = data
        self._count = count

    @property
    def size(self) -> int:
        """The number of inputs in a round."""
        return min(self._count, len(self._places()[0]))

    def inputs(self, seed: int, round_index: int, like: Tensor) -> Tensor:
        """Returns the inputs of a round, [n, ...], a function of the seed and the round alone.

        Args:
            seed: The seed of the run.
            round_index: The round, from 0.
            like: A tensor with the dtype and the device of models.
        """
        places, owners = self._places()
        rng = generator(seed, "public samples", round_index)
        picks = rng.permutation(len(places))[: self._count]
        index = torch.from_numpy(places[picks]).long()
        inputs, _ = ClientData(self._data).gather(index, like.dtype, owners[picks])
        return inputs.to(like.device)

    def check(self, method: Method) -> None:
        """Refuses inputs that the network cannot take, once the data are known.

        Raises:
            ConfigError: They have another shape than the clients' samples.
        """
        own = tuple(method.run.loop.datamodule.input_shape)
        given = tuple(self._data.input_shape)
        if own != given:
            raise ConfigError(
                f"model.public: the inputs of {type(self._data).__name__} have the shape "
                f"{list(given)} and those of the clients {list(own)}; give data of one shape"
            )

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns where the samples lie, each once, and the first owner of each."""
        arrays = self._data.partition.train
        if arrays.is_shared:
            places = np.unique(arrays[0])
            return places, np.zeros_like(places)
        places, first = np.unique(arrays.flat, return_index=True)
        return places, arrays.owners[first]


def public_batches(
    inputs: Tensor,
    targets: Tensor,
    schedule: LocalSchedule,
    keys: tuple[int, int],
    work: float = 1.0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields mini-batches of public inputs [n, ...] and their targets, in random order.

    Args:
        inputs: The inputs.
        targets: What a network is to give for each of them, [n, ...].
        schedule: Inputs in a mini-batch, and epochs, or the number of steps.
        keys: The seed of the run and the round, on which the order depends.
        work: The share of the steps that is taken, below 1 for stragglers.
    """
    rng = generator(keys[0], "public order", keys[1])
    per_epoch = int(schedule.steps_per_epoch(np.array([len(inputs)]))[0])
    steps = schedule.steps or schedule.epochs * per_epoch
    steps = math.ceil(round(work * steps, 9))
    while steps:
        order = torch.from_numpy(rng.permutation(len(inputs))).to(inputs.device)
        for picks in order.split(schedule.batch_size or len(inputs))[:steps]:
            yield inputs[picks], targets[picks]
            steps -= 1


def batch_for(
    ids: np.ndarray, inputs: Tensor, targets: Tensor, keys: tuple[int, int, int]
) -> Batch:
    """Returns a mini-batch that C clients have in common.

    Args:
        ids: The ids of the C clients.
        inputs: The inputs, [B, ...].
        targets: What a network is to give for each of them, [B, ...].
        keys: The seed of the run, the round and the step, for networks that draw.
    """
    seed, round_index, step = keys
    base = key(seed, "public draws", round_index)
    count = len(ids)
    origin = StepOrigin(base, ids, round_index, np.ones(count, np.int64), 0, step)
    return Batch(
        inputs.expand(count, *inputs.shape),
        targets.expand(count, *targets.shape),
        [len(inputs)] * count,
        origin,
    )
