"""An engine whose gradients have sample-level differential privacy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pfl.engines.base import Engine
from pfl.engines.batch import Batch, Buffers, Origin
from pfl.engines.objective import Objective
from pfl.engines.threads import GROUP_FLOATS
from pfl.errors import ConfigError
from pfl.randomness import DrawKey, key


@dataclass(frozen=True)
class SampleOrigin(Origin):
    """The origin of single samples that were taken out of the rows of a batch.

    Attributes:
        batch: The origin of the batch.
        owners: The row of each sample.
    """

    batch: Origin
    owners: list[int]

    def seed(self, row: int) -> int:
        return key(self.batch.seed(self.owners[row]), row)

    def describe(self, row: int) -> str:
        return self.batch.describe(self.owners[row])


class PrivateEngine(Engine):
    """DP-SGD's gradients (Abadi et al., CCS 2016, Algorithm 1), computed by another engine.

        for each sample of a mini-batch:  g <- g min(1, C / |g|)
        gradient = (sum g + z C N(0, I)) / expected size of the mini-batch

    Every gradient must be that of a mini-batch of its own (`Clients.step_blocks`, with Poisson
    sampling), since the noise is a function of (key, purpose, round, client, step). Losses have no
    noise. `outputs` refuses training samples.

    Args:
        inner: The engine that runs the network.
        clip: C, the greatest norm of a sample's gradient.
        noise_multiplier: z, the noise's standard deviation in units of C.
        batch_size: The expected size of mini-batches; None: all samples.
        draws: Where the noise comes from.
    """

    def __init__(
        self,
        inner: Engine,
        clip: float,
        noise_multiplier: float,
        batch_size: int | None,
        draws: DrawKey,
    ) -> None:
        super().__init__(inner.runner)
        self.inner = inner
        self.name = inner.name
        self.batched = inner.batched
        self.max_threads = inner.max_threads
        self.clip = clip
        self.noise_multiplier = noise_multiplier
        self.batch_size = batch_size
        self.draws = draws
        self._used: dict[int, tuple[int, set[int]]] = {}  # round and steps, by client

    def gradient(
        self, w: Tensor, batch: Batch, buffers: Buffers = None, objective: Objective | None = None
    ) -> tuple[Tensor, Tensor]:
        expected = self._register(batch)
        owner = torch.arange(batch.clients, device=w.device).repeat_interleave(batch.sizes)
        columns = torch.arange(batch.inputs.shape[1], device=w.device)
        real = columns < batch.sizes[:, None]  # a mini-batch may be empty
        inputs = batch.inputs[real][:, None]
        targets = batch.targets[real][:, None]
        total = torch.zeros_like(w)
        loss = w.new_zeros(len(w))
        size = max(1, GROUP_FLOATS // w.shape[1])
        for begin in range(0, len(owner), size):
            part = slice(begin, begin + size)
            own = owner[part]
            origin = SampleOrigin(batch.origin, own.tolist())
            one = Batch(inputs[part], targets[part], [1] * len(own), origin)
            losses, g = self.inner.gradient(w[own], one, None)
            g *= (self.clip / g.norm(dim=1).clamp_min(self.clip))[:, None]
            total.index_add_(0, own, g)
            loss.index_add_(0, own, losses.to(loss))
        if self.noise_multiplier:
            deviation = self.noise_multiplier * self.clip
            for row in range(batch.clients):
                rng = self.draws.generator("sample noise", batch.origin.seed(row) % 2**63)
                noise = torch.from_numpy(rng.standard_normal(w.shape[1]))
                total[row] += (deviation * noise).to(total)
        return loss / batch.sizes.clamp_min(1), total / expected.to(total)[:, None]

    def _register(self, batch: Batch) -> Tensor:
        """Counts the use of a mini-batch, and returns the expected sizes [A].

        Refuses one that is not a Poisson sample of the method's batch size, or was used before.
        """
        origin = batch.origin
        expected = getattr(origin, "expected", None)
        if expected is None or origin.batch_size != self.batch_size:  # type: ignore[attr-defined]
            raise ConfigError(
                "loop.sample_privacy: the method takes gradients of other samples than "
                "mini-batches of model.batch_size, which are not counted; take another method"
            )
        for row in range(batch.clients):
            client = int(origin.ids[row])  # type: ignore[attr-defined]
            step = origin.seed(row)
            number, steps = self._used.get(client, (-1, set()))
            if number != origin.round:  # type: ignore[attr-defined]
                number = origin.round  # type: ignore[attr-defined]
                steps = set()
            if step in steps:
                raise ConfigError(
                    "loop.sample_privacy: the method takes two gradients of one mini-batch, and "
                    "their noise would be the same; take another method"
                )
            steps.add(step)
            self._used[client] = number, steps
        return torch.from_numpy(expected[: batch.clients])

    def take_counts(self, ids: np.ndarray) -> Tensor:
        """Returns how many gradients some clients took since the last call, [C, 1]."""
        counts = [len(self._used.pop(client, (0, set()))[1]) for client in ids.tolist()]
        return torch.tensor(counts, dtype=torch.float64)[:, None]

    def release(self) -> None:
        """Also forgets the steps that are not counted: their clients begin the round anew."""
        super().release()
        self.inner.release()
        self._used = {}

    def outputs(self, w: Tensor, batch: Batch, buffers: Buffers = None) -> Tensor:
        if hasattr(batch.origin, "expected"):
            raise ConfigError(
                "loop.sample_privacy: the method looks at its training samples beside their "
                "gradients; take another method"
            )
        return self.inner.outputs(w, batch, buffers)

    def group_size(self, clients: int, threads: int) -> int:
        return self.inner.group_size(clients, threads)

    def samples_at_once(self, sample_size: int) -> int:
        return self.inner.samples_at_once(sample_size)
