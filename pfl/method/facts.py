"""Facts about a run that a method may use, the same for the server and for all clients."""

from __future__ import annotations

from functools import cached_property

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from pfl.aggregation.privacy import PrivateMean
from pfl.context import RunContext
from pfl.errors import ConfigError
from pfl.rounds.loop import FederatedLoop


class RunFacts:
    """What is known of a run before it begins.

    Args:
        loop: The loop of the run.
        trainer: The Trainer of the run; None where a client trains apart from the server, which
            has checked the run.
        max_rounds: The number of rounds; None: the Trainer's, if there is one.
    """

    def __init__(
        self, loop: FederatedLoop, trainer: Trainer | None = None, max_rounds: int | None = None
    ) -> None:
        self.loop = loop
        self.trainer = trainer
        self._max_rounds = max_rounds

    def context(self, device: torch.device) -> RunContext:
        """Returns the facts that every round and every stage may read."""
        loop = self.loop
        rank, processes = loop.place()
        return RunContext(
            seed=loop.seed,
            population=loop.population,
            sizes=loop.datamodule.client_sizes,
            rounds=self.max_rounds,
            device=device,
            rank=rank,
            processes=processes,
        )

    @cached_property
    def private(self) -> PrivateMean | None:
        """What makes the means of the run private; None without `loop.privacy`."""
        return self.loop.participation.private_mean(self.max_rounds)

    @property
    def max_rounds(self) -> int | None:
        """The number of rounds after which the run ends; None if that is not known beforehand."""
        rounds = self._max_rounds
        if self.trainer is not None:
            rounds = self.trainer.max_epochs
        if rounds is not None and rounds < 0:
            return None
        return rounds

    @cached_property
    def sample_sums(self) -> Tensor:
        """Sums by which other data are recognised, float64: of each of at most 200 samples.

        The samples lie evenly among all, whose number comes first. The values of input and target
        have weights from 1 to 2, so that their order counts.
        """
        samples = self.loop.datamodule.samples
        total = len(samples)
        sums = [torch.tensor([total], dtype=torch.float64)]
        for index in torch.arange(0, total, -(-total // 200)).split(20):
            pair = [part.reshape(len(index), -1).double() for part in samples.gather(index)]
            values = torch.cat(pair, 1)
            sums.append(values @ torch.linspace(1, 2, values.shape[1], dtype=torch.float64))
        return torch.cat(sums)

    def require_validation(self, reason: str) -> None:
        """Refuses a run that does not measure a validation loss, or in which it is not private."""
        loop = self.loop
        trainer = self.trainer
        if self.private is not None:
            raise ConfigError(
                f"loop.privacy: model.{reason} uses the clients' validation losses, which are not "
                f"private; give another value"
            )
        if not (loop.datamodule.partition.val.sizes.any() and "val" in loop.evaluate):
            raise ConfigError(
                f"model.{reason} needs a validation loss; give data.protocol a validation share, "
                f"and loop.evaluate val"
            )
        if trainer and trainer.state.fn == "fit" and trainer.limit_val_batches == 0:
            raise ConfigError(
                f"trainer.limit_val_batches: 0; model.{reason} needs a validation loss, give 1.0"
            )

    def require_exact_states(self, reason: str) -> None:
        """Refuses a run whose client states are stored in 16 bits."""
        dtype = self.loop.state_dtype
        if dtype is not None and dtype.itemsize < 4:
            raise ConfigError(
                f"loop.state_dtype: {str(dtype).removeprefix('torch.')}; model.{reason} adds up "
                f"small changes of a client state, which would drift; give float32 or null"
            )


def loop_of(trainer: Trainer, method: str) -> FederatedLoop:
    """Returns the loop of a Trainer.

    Raises:
        ConfigError: The Trainer has other data.
    """
    loop = getattr(trainer, "datamodule", None)
    if not isinstance(loop, FederatedLoop):
        raise ConfigError(
            f"datamodule: {method} trains with a FederatedLoop around the data; "
            f"pass datamodule=FederatedLoop(your_datamodule, clients_per_round=...)"
        )
    return loop
