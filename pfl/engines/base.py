"""The interface of an engine, with defaults for all but the gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from pfl._private import version_of
from pfl.engines.batch import Batch, Buffers, StepBlock, some_rows
from pfl.engines.local_step import Step
from pfl.engines.objective import Objective
from pfl.engines.runner import ModelRunner
from pfl.engines.threads import GROUP_FLOATS
from pfl.errors import ConfigError

EngineName: TypeAlias = str
"""What a user can ask for: "auto", one of the names of `pfl.engines.registry`, or a class path."""


class Engine(ABC):
    """A way to run a network with the models of several clients, the rows of a matrix [C, P].

    All engines compute the same values, to rounding. A new engine needs a name and `gradient`; the
    other methods have defaults. `pfl.engines.registry` lists the engines, and `select_engine`
    decides which one is used.

    Args:
        runner: The network, its loss, and what was found out about them.
    """

    name: str
    """How the run's record names the engine."""
    batched: bool = False
    """Whether one call computes several clients' models."""
    max_threads: int | None = None
    """How many threads may call at the same time; None: any number."""
    serves_objectives: bool = False
    """Whether `gradient` takes an `Objective`."""
    keeps_inputs: bool = False
    """Whether inputs are never changed, as a layer that works in place would."""
    strict: bool = False
    """Whether the method's own code is checked as closely as possible, at any cost in time."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    # ---- which runs get the engine ------------------------------------------------------------

    @classmethod
    def obstacle(cls, runner: ModelRunner, batch: Batch, asked: EngineName) -> str | None:
        """Returns in words why a run does not get this engine; None: it is tried.

        Args:
            runner: The network and its loss.
            batch: A few samples of one client.
            asked: What the user asked for, such as "auto".
        """
        return None

    @classmethod
    def of(cls, runner: ModelRunner, batch: Batch) -> Engine:
        """Returns the engine of a network for which there is no obstacle."""
        return cls(runner)

    @classmethod
    def to_record(cls, engine: Engine, clients: int) -> Engine | None:
        """Returns an engine of this class whose recorded steps a GPU tries; None: none.

        Args:
            engine: The engine that the run has without recorded steps.
            clients: How many clients train together.
        """
        return None

    # ---- training -----------------------------------------------------------------------------

    @abstractmethod
    def gradient(
        self, w: Tensor, batch: Batch, buffers: Buffers = None, objective: Objective | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the mean loss [A] of each row of a batch, and its gradient [A, P].

        Args:
            w: [A, P], the model of each row of the batch.
            batch: A mini-batch of each of A clients.
            buffers: Changed in place by running the network.
            objective: A loss that replaces the runner's, with rows for the A clients; only engines
                that serve objectives get one.
        """

    def descend(
        self,
        v: Tensor,
        blocks: Iterable[StepBlock],
        step: Step,
        buffers: Buffers = None,
        objective: Objective | None = None,
    ) -> tuple[Tensor, list[int]]:
        """Takes plain steps of v [C, P] in place, batch after batch; the rest as for `gradient`.

        Rows that a batch does not have keep their values.

        Returns:
            The mean losses of all rows of all batches, one after another, and their sample counts.
        """
        losses = [v.new_empty(0)]
        counts: list[int] = []
        for block in blocks:
            counts += block.counts.ravel().tolist()
            for batch in block:
                rows = slice(batch.clients)
                own = some_rows(buffers, rows)
                f = objective and objective.rows(rows)
                losses.append(self.take_step(v[rows], batch, step.rows(rows), own, f))
        return torch.cat(losses), counts

    def take_step(
        self, v: Tensor, batch: Batch, step: Step, buffers: Buffers, objective: Objective | None
    ) -> Tensor:
        """Takes one plain step of v [A, P] in place; returns the losses [A]."""
        u = step.gradient_point(v)
        loss, g = self.gradient(u, batch, buffers, objective)
        if step.rule is not None:
            step = step._replace(rule=step.rule._replace(gradient=g))
        elif step.part is None:
            v.mul_(step.shrink).sub_(g, alpha=step.lr)
        else:
            moved = v.mul(step.shrink).sub_(g, alpha=step.lr)
            torch.where(step.part, moved, v, out=v)
        step.apply_after_gradient(v, u)
        return loss

    def seeds_of(self, batch: Batch) -> Tensor:
        """Returns the seeds of a network that draws from them, int64 [A]; else zeros."""
        if self.runner.has_keys:
            return batch.seeds()
        return torch.zeros(batch.clients, dtype=torch.int64, device=batch.inputs.device)

    # ---- evaluation ---------------------------------------------------------------------------

    def outputs(self, w: Tensor, batch: Batch, buffers: Buffers = None) -> Tensor:
        """Returns the outputs [A, B, ...] of each row's own model, in evaluation mode."""
        own: Any = buffers
        if buffers is None:
            own = [None] * len(w)
        rows = [self.predict(w[c], batch.inputs[c, :n], own[c]) for c, n in enumerate(batch.counts)]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def predict(self, w: Tensor, inputs: Tensor, buffers: Tensor | None = None) -> Tensor:
        """Returns the outputs [n, ...] of one model w [P] for inputs [n, ...], to evaluate it."""
        return self.runner.predict(w, inputs, buffers)

    def scores(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each sample's loss and share of right predictions; see `ModelRunner.scores`."""
        return self.runner.scores(outputs, targets)

    # ---- memory and threads -------------------------------------------------------------------

    def release(self) -> None:
        """Drops what the engine keeps of earlier calls, so that its memory can be freed."""
        self.runner.release()

    def releases_gil(self) -> bool:
        """Whether `descend` runs without the interpreter's lock, so that threads run at once."""
        return False

    def group_size(self, clients: int, threads: int) -> int:
        """Returns how many of `clients` clients train in lock step, on `threads` threads."""
        share = -(-clients // threads)
        size = self.runner.space.size
        on_cpu = self.runner.space.vector.device.type == "cpu"
        if not self.batched and on_cpu:
            return 1
        if not self.batched:
            return max(1, share)
        if share * size < GROUP_FLOATS // 8:
            share = clients  # threads would spend their time waiting for the interpreter
        if on_cpu:
            share = min(share, GROUP_FLOATS // size)
        return max(1, share)

    def samples_at_once(self, sample_size: int) -> int:
        """Returns how many samples of `sample_size` values a CPU's cache holds in a forward pass.

        An unbatched engine has half as many: there, networks have convolutions, whose feature maps
        are larger than their images.
        """
        if self.batched:
            return GROUP_FLOATS // sample_size
        return GROUP_FLOATS // (2 * sample_size)

    @contextmanager
    def guard(self, clients: Any, shared: Callable[[], Mapping[str, Tensor]]) -> Iterator[None]:
        """Checks around a method's own code on some clients that it changes no shared tensor.

        PyTorch counts the writes into a tensor, so that the check costs nothing. The debug engine
        also compares the values. `shared` gives the tensors by name.

        Raises:
            ConfigError: The code wrote into one of them.
        """
        ids = clients.ids.copy()
        before = {name: (tensor, version_of(tensor)) for name, tensor in shared().items()}
        writes = self._writes_into_network()
        yield
        if not np.array_equal(ids, clients.ids):
            raise ConfigError(
                f"model: its code changed `clients.ids` in place, from {ids.tolist()} to "
                f"{clients.ids.tolist()}; work on a copy"
            )
        changed = [f"`{name}`" for name, (t, version) in before.items() if version_of(t) != version]
        if self._writes_into_network() != writes:
            changed.append("`self.network`")  # its parameters count writes of their own
        if changed:
            raise ConfigError(
                f"model: its code changed {', '.join(changed)} in place, but other clients use the "
                f"same values; work on a copy, such as w.clone()"
            )

    def _writes_into_network(self) -> int:
        """Returns how often the parameters of the method's own network were written in place."""
        return sum(version_of(parameter) for parameter in self.runner.original.parameters())
