"""A chunk of clients as the algorithms see it."""

from __future__ import annotations

import copy
import math
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pfl.clients import sample_order
from pfl.clients.schedule import LocalSchedule
from pfl.datamodules.partitions.index_arrays import Ragged
from pfl.datamodules.randomness import uniform
from pfl.datamodules.samples.samples import Samples, TensorSamples, scaled
from pfl.engines.batch import Batch, Origin, StepBlock, cast, some_rows
from pfl.errors import ConfigError
from pfl.randomness import fold, key

if TYPE_CHECKING:
    from pfl.datamodules import FederatedDataModule

READ_AHEAD = 1 << 20  # floats of streamed or transformed samples
READ_AHEAD_ON_GPU = 1 << 24  # transforms are many small kernels, which should be few calls
COPY = 1 << 28  # bytes that a copy of evaluated samples may have


class Poison(Protocol):
    """Clients that train on other samples than they have."""

    def attacking(self, round_index: int, ids: np.ndarray) -> np.ndarray:
        """Returns which of the clients `ids` [n] do so in a round, bool [n]."""

    def poison(self, inputs: Tensor, targets: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what they train on in place of the samples `inputs`, `targets` with `keys`."""


class OrderedSamples(TensorSamples):
    """Samples in memory of which consecutive ones are gathered without a copy."""

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        flat = index.reshape(-1)
        if not len(flat):
            return super().gather(index)
        first = int(flat[0])
        part = slice(first, first + len(flat))
        if not torch.equal(flat, torch.arange(part.start, part.stop, dtype=flat.dtype)):
            return super().gather(index)
        found = scaled(self.inputs[part]), self.targets[part]
        inputs, targets = (x.reshape(index.shape + x.shape[1:]) for x in found)
        return inputs, targets


class ClientData:
    """The samples and index arrays of a data module, on the device where the training happens.

    Args:
        datamodule: The data module, after its `setup`.
        device: In-memory samples are moved to the device once, streamed samples when they are read.
        seed: A key of the order in which clients see their samples.
        poison: What some clients train on in place of their samples; None: nobody does.
    """

    def __init__(
        self,
        datamodule: FederatedDataModule,
        device: torch.device | str = "cpu",
        seed: int = 0,
        poison: Poison | None = None,
    ) -> None:
        self.seed = seed
        self.poison = poison
        self.device = torch.device(device)
        self.transforms = datamodule.transforms
        self._shown_as_stored = not datamodule.transforms and poison is None
        self.whole_samples: Samples = datamodule.samples.to(device)
        self.frozen: tuple[str, Tensor] | None = None  # what frozen layers give, by its checksum
        # The seed of mini-batches that are Poisson samples; None: they are no Poisson samples.
        self.poisson: int | None = None
        # In these four a view differs from the data that it was made of.
        self.samples = self.whole_samples
        self.splits = datamodule.partition
        self.owners: Tensor | None = None  # of pooled samples: whose they are, int64 [N]
        self.trigger: tuple[Callable[[Tensor], Tensor], int] | None = None  # of a backdoor
        # What was computed of the four, and is kept.
        self._views: dict[str, ClientData] = {}
        self._indices: dict[str, Tensor] = {}  # those of a split's samples, on the device

    def _view(self, **parts: Any) -> ClientData:
        """Returns the same data with other `samples`, `splits`, `owners` or `trigger`."""
        view = copy.copy(self)
        for name, part in parts.items():
            setattr(view, name, part)
        view._views = {}
        view._indices = {}
        return view

    def draw_poisson_samples(self, seed: int | None) -> None:
        """Makes mini-batches Poisson samples, drawn from a seed; None: they are no longer any."""
        self.poisson = seed

    def show(self, samples: Samples) -> None:
        """Has samples in the place of the data module's: what a network's frozen part gives."""
        self.samples = samples
        self._views = {}

    def few(self, count: int) -> ClientData:
        """Returns data in which each client has its first training samples, `count` at most.

        A server has none of its parties' samples, and would else lay out all their places.
        """
        sizes = np.minimum(self.splits.train.sizes, count)
        train = Ragged.from_sizes(np.zeros(int(sizes.sum()), np.int64), sizes)
        return self._view(splits=replace(self.splits, train=train))

    def as_one_client(self, ids: np.ndarray) -> ClientData:
        """Returns the samples of the clients `ids` as if one client, with the id 0, owned them all.

        The samples are not copied. Transforms show a sample as its own client sees it, or as one of
        its clients if it has several.
        """
        if "one client" not in self._views:
            own = self.splits.train
            indices = own.flat if len(ids) == len(own.sizes) else own.of(ids)
            train = Ragged.from_sizes(indices, np.array([len(indices)]))
            owners = None
            if self.transforms.per_client:
                whose = np.zeros(len(self.samples), np.int64)
                whose[indices] = np.repeat(ids, own.sizes[ids])
                owners = torch.from_numpy(whose).to(self.device)
            splits = replace(self.splits, train=train)
            self._views["one client"] = self._view(splits=splits, owners=owners)
        return self._views["one client"]

    def with_backdoor(self, trigger: Callable[[Tensor], Tensor], target: int) -> ClientData:
        """Returns the test samples of other classes as a backdoor shows them.

        `trigger` changes inputs [n, ...]; all samples then have the class `target`.
        """
        if "backdoor" not in self._views:
            test = self.splits.test
            assert self.samples.targets is not None
            others = self.samples.targets[torch.from_numpy(test.flat)].cpu().numpy() != target
            splits = replace(self.splits, test=test.select(others))
            self._views["backdoor"] = self._view(splits=splits, trigger=(trigger, target))
        return self._views["backdoor"]

    def in_order(self, split: str) -> ClientData:
        """Returns the samples of a split laid out client by client, to be read without copies.

        They are copied once; where that takes too much memory, these samples are returned. Inputs
        that are gathered may be a part of the copy, and must not be changed.
        """
        own = getattr(self.splits, split)
        samples = self.samples
        stored = isinstance(own, Ragged) and self.in_memory and self.device.type == "cpu"
        if self.transforms or self.trigger is not None or not stored:
            return self
        name = f"{split} in order"
        if name not in self._views:
            nbytes = own.sizes.sum() * samples.nbytes // len(samples)
            if own.is_shared or not 0 < nbytes <= COPY:
                return self
            flat = own.flat
            assert isinstance(samples, TensorSamples)
            ordered: dict[str, Any] = {split: Ragged.from_sizes(np.arange(len(flat)), own.sizes)}
            self._views[name] = self._view(
                samples=OrderedSamples(samples.inputs[flat], samples.targets[flat]),
                splits=replace(self.splits, **ordered),
            )
        return self._views[name]

    def sizes(self, split: str, ids: np.ndarray) -> np.ndarray:
        """Returns how many samples of a split each of these clients owns, int64 [C]."""
        return getattr(self.splits, split).sizes[ids]

    def owned(self, split: str, ids: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Returns the indices of a split's samples, and where these clients' begin, int64 [C].

        The indices, int64 or int32 on the device, are all clients' if the partition stores them,
        and these clients' alone if it draws them on demand.
        """
        arrays = getattr(self.splits, split)
        if not isinstance(arrays, Ragged):
            sizes = arrays.sizes[ids]
            return torch.from_numpy(arrays.of(ids)).to(self.device), np.cumsum(sizes) - sizes
        if split not in self._indices:
            self._indices[split] = torch.from_numpy(arrays.indices).to(self.device)
        return self._indices[split], arrays.starts[ids]

    @property
    def in_memory(self) -> bool:
        """True if all samples are tensors in memory; False if they are streamed."""
        return type(self.samples) is TensorSamples

    def shared(self, split: str) -> bool:
        """Returns True if all clients have the same samples of a split, and see them alike."""
        return getattr(self.splits, split).is_shared and not self.transforms.per_client

    def gather(
        self, index: Tensor, dtype: torch.dtype, owners: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets as evaluation sees them; floating values in `dtype`.

        The indices are integers of any shape, to which that of the samples' owners broadcasts.
        """
        inputs, targets = self.samples.gather(index.long())
        if self.transforms:
            ids = torch.from_numpy(owners).to(index.device)
            seen = self.transforms(inputs.flatten(0, index.ndim - 1), ids, index)
            inputs = seen.unflatten(0, index.shape)
        if self.trigger is not None:
            trigger, target = self.trigger
            inputs = trigger(inputs.flatten(0, index.ndim - 1)).unflatten(0, index.shape)
            targets = torch.full_like(targets, target)
        return cast(inputs, dtype), cast(targets, dtype)

    def add_poison(
        self, inputs: Tensor, targets: Tensor, index: Tensor, ids: np.ndarray, round_index: int
    ) -> tuple[Tensor, Tensor]:
        """Returns training samples [n, ...] with what attackers train on in place of theirs.

        The indices have a shape [..., B] with n entries, to which that of the clients' ids
        broadcasts; rounds count from 0.
        """
        if self.poison is None:
            return inputs, targets
        owners = np.broadcast_to(ids, index.shape).reshape(-1)
        rows = torch.from_numpy(np.flatnonzero(self.poison.attacking(round_index, owners)))
        if len(rows):
            rows = rows.to(inputs.device)
            clients = torch.from_numpy(owners.copy()).to(inputs.device)[rows]
            keys = fold(torch.full_like(clients, key(self.seed, "poison")), clients)
            keys = fold(keys, index.reshape(-1)[rows].long())
            inputs = inputs.clone()
            targets = targets.clone()
            inputs[rows], targets[rows] = self.poison.poison(inputs[rows], targets[rows], keys)
        return inputs, targets

    def stored(
        self, picks: Tensor, ids: np.ndarray, epochs: np.ndarray, base: int, round_index: int
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yields the samples of K local steps of A clients.

        Streamed samples are read, and transforms made, for some steps at a time. What a training
        sample looks like is a function of (base, client, epoch, sample).

        Args:
            picks: The indices of the samples that each step takes, [K, A, B].
            ids: The clients, int64 [A].
            epochs: The epoch of each step, int64 [K, A].
            base: The key of the draws of the round and the purpose.
            round_index: The round, from 0.

        Yields:
            A range of steps; inputs and targets; the positions in these of the steps' samples.
        """
        if self._shown_as_stored and self.in_memory:
            samples = typing.cast(TensorSamples, self.samples)
            yield slice(0, len(picks)), samples.inputs, samples.targets, picks
            return
        owners = torch.from_numpy(ids).to(picks.device, non_blocking=True)
        visits = torch.from_numpy(epochs).to(picks.device, non_blocking=True)
        visits = fold(fold(torch.full_like(owners, key(base, "transforms")), owners), visits)
        size = picks[0].numel() * max(1, math.prod(self.samples.input_shape))
        floats = READ_AHEAD
        if self.device.type != "cpu":
            floats = READ_AHEAD_ON_GPU
        ahead = max(1, floats // size)
        for first in range(0, len(picks), ahead):
            steps = slice(first, first + ahead)
            part = picks[steps]
            inputs, targets = self.samples.gather(part.reshape(-1))
            if self.transforms:
                seen_by = owners[:, None]
                if self.owners is not None:
                    seen_by = self.owners[part.long()]
                inputs = self.transforms(inputs, seen_by, part, visits[steps, :, None])
            inputs, targets = self.add_poison(inputs, targets, part, ids[:, None], round_index)
            places = torch.arange(part.numel(), device=part.device).view(part.shape)
            yield steps, inputs, targets, places


@dataclass
class Clients:
    """C clients that train, or are evaluated, together: the rows of every [C, P] matrix.

    Attributes:
        ids: int64 [C], by falling number of samples of `split`, so that the clients that still
            train are always the first rows.
        round: The round, from 0.
        data: The samples of all clients.
        split: "train", "val" or "test".
        state: The declared client states of these clients by name, [C, width]. What
            `client_update` leaves here is kept for the client's next round.
        received: What these clients have received, by the names of the server's messages: [K], the
            same for all clients, or [C, K] for a message to each client.
        personal_messages: The names of the messages with a row for each client.
        buffers: The statistics of the model that is sent, [C, number of changing buffer values];
            None if the network has no such buffers.
        dtype: The dtype of the models.
        work: The share of their local steps that these clients take, below 1 for stragglers.
        rate: A factor on their learning rate.

    Example:
        >>> import numpy as np
        >>> from pfl.datamodules import Dirichlet, DigitsDataModule
        >>> data = DigitsDataModule(num_clients=5, partition=Dirichlet(1.0), seed=0)
        >>> data.setup()
        >>> largest_first = np.argsort(-data.client_sizes)
        >>> clients = Clients(largest_first[:2], 0, ClientData(data))
        >>> batch = next(clients.batches(LocalSchedule(batch_size=8)))
        >>> batch.counts  # of each client's row of the batch
        [8, 8]
        >>> batch.inputs.shape
        torch.Size([2, 8, 1, 8, 8])
    """

    ids: np.ndarray
    round: int
    data: ClientData
    split: str = "train"
    state: dict[str, Tensor] = field(default_factory=dict)
    received: dict[str, Tensor] = field(default_factory=dict)
    personal_messages: frozenset[str] = frozenset()
    buffers: Tensor | None = None
    dtype: torch.dtype = torch.float32
    work: float = 1.0
    rate: float = 1.0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sizes(self) -> np.ndarray:
        """Number of samples of each client, int64 [C]."""
        return getattr(self.data.splits, self.split).sizes[self.ids]

    @property
    def empty(self) -> slice:
        """The rows of clients without samples, which are the last rows."""
        return slice(int((self.sizes > 0).sum()), None)

    @property
    def personal(self) -> Clients:
        """The same clients with the statistics of their personalized models as `buffers`.

        For methods that declare `personal_buffers`; `state` is shared.
        """
        if self.buffers is None:
            return self
        return replace(self, buffers=self.state["personal_buffers"])

    def groups(self, size: int) -> list[Clients]:
        """Returns the clients in groups of at most `size`, in their order; one group if empty."""
        begins = range(0, max(1, len(self)), size)
        return [self.rows(slice(begin, begin + size)) for begin in begins]

    def rows(self, rows: slice | np.ndarray) -> Clients:
        """Returns some of the clients; their state and buffers are views if `rows` is a slice."""
        places = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        state = {name: values[places] for name, values in self.state.items()}
        own = {name: self.received[name][places] for name in self.personal_messages}
        received = {**self.received, **own}
        buffers = some_rows(self.buffers, places)
        return replace(self, ids=self.ids[rows], state=state, received=received, buffers=buffers)

    def steps_of(self, schedule: LocalSchedule) -> np.ndarray:
        """Returns how many local steps of a schedule each client takes, int64 [C].

        A straggler takes the share `work` of its steps, rounded up. A client without samples takes
        none.
        """
        return schedule.steps_of(self.sizes, self.work)

    def step_blocks(self, schedule: LocalSchedule) -> Iterator[StepBlock]:
        """Yields every client's mini-batches, some local steps of all clients at a time.

        Each epoch of a client is a fresh shuffle, a function of (seed, purpose, round, client,
        epoch). A client whose steps are used up leaves; the remaining clients are the first rows.
        A straggler takes only the first part of its steps.
        """
        sizes = self.sizes
        steps = self.steps_of(schedule)
        assert (np.diff(sizes) <= 0).all(), "clients must come largest first"
        if not steps.any():
            return
        seed = self.data.seed
        if self.data.poisson is not None:
            seed = self.data.poisson
        base = key(seed, schedule.purpose, self.round)
        indices, starts = self.data.owned(self.split, self.ids)
        if self.data.poisson is not None:
            yield from self._poisson_blocks(schedule, base, indices, starts)
            return
        owned = np.stack([self.ids, starts, sizes])
        per_epoch = schedule.steps_per_epoch(sizes)
        size = schedule.batch_size
        if size is None:
            size = int(sizes[0])
        for first, last, A in sample_order.step_ranges(steps, per_epoch, size):
            epoch, place = np.divmod(np.arange(first, last)[:, None], per_epoch[:A])
            place *= size
            counts = np.minimum(sizes[:A] - place, size)
            if schedule.batch_size is None:
                picks = sample_order.full_batch_indices(indices, owned[:, :A], last - first)
            else:
                picks = sample_order.shuffled_indices(
                    indices, owned[:, :A], base, epoch, place, counts, size
                )
            stored = self.data.stored(picks, self.ids[:A], epoch, base, self.round)
            for part, inputs, targets, places in stored:
                begin = first + part.start
                origin = partial(StepOrigin, base, self.ids, self.round, per_epoch, begin)
                block = StepBlock(inputs, targets, places, counts[part], self.dtype, origin)
                block.lasting = inputs is getattr(self.data.samples, "inputs", None)
                yield block

    def _poisson_blocks(
        self, schedule: LocalSchedule, base: int, indices: Tensor, starts: np.ndarray
    ) -> Iterator[StepBlock]:
        """Yields mini-batches to which each sample belongs on its own, with an expected size."""
        sizes = self.sizes
        steps = self.steps_of(schedule)
        expected = sizes
        if schedule.batch_size is not None:
            expected = np.minimum(schedule.batch_size, sizes)
        per_epoch = schedule.steps_per_epoch(sizes)
        for step in range(int(steps[0])):
            A = int((steps > step).sum())
            owner, nth = sample_order.ragged_arange(sizes[:A])
            ids = _long(self.ids[owner])
            keys = fold(torch.full_like(ids, key(base, "poisson", step)), ids)
            rates = torch.from_numpy(expected[owner] / sizes[owner])
            chosen = (uniform(fold(keys, _long(nth))) < rates).numpy()
            counts = np.bincount(owner[chosen], minlength=A)
            picks = indices[_long(starts[:A]).to(indices.device)][:, None]
            picks = picks.repeat(1, max(1, int(counts.max())))  # padding: a client's first sample
            rows, places = sample_order.ragged_arange(counts)
            taken = _long((starts[owner] + nth)[chosen]).to(indices.device)
            picks[_long(rows).to(picks.device), _long(places).to(picks.device)] = indices[taken]
            epoch = (step // per_epoch[:A])[None]
            stored = self.data.stored(picks[None], self.ids[:A], epoch, base, self.round)
            for part, inputs, targets, positions in stored:
                begin = step + part.start
                origin = partial(PoissonOrigin, base, self.ids, self.round, per_epoch, begin)
                sampled = partial(origin, expected=expected, batch_size=schedule.batch_size)
                yield StepBlock(inputs, targets, positions, counts[None], self.dtype, sampled)

    def batches(self, schedule: LocalSchedule) -> Iterator[Batch]:
        """Yields the mini-batches of a schedule, one local step of all clients at a time.

        The row c of a batch belongs to client c. A batch of A rows belongs to the first A clients:
        the others have used up their steps.
        """
        for block in self.step_blocks(schedule):
            yield from block

    def training(self) -> tuple[Clients, Tensor]:
        """Returns the clients with their training samples, and the places of their rows here.

        The clients are sorted anew, by numbers of training samples, and have no states. The places
        are int64 [C].
        """
        return self._in_split("train")

    def _in_split(self, split: str) -> tuple[Clients, Tensor]:
        order = np.argsort(-self.data.sizes(split, self.ids), kind="stable")
        places = torch.from_numpy(order)
        buffers = some_rows(self.buffers, places)
        sorted_ = Clients(
            self.ids[order], self.round, self.data, split, buffers=buffers, dtype=self.dtype
        )
        return sorted_, places

    def training_samples(self, limit: int = 512) -> Iterator[tuple[Tensor, Batch]]:
        """Yields what `samples` yields for the training split; the rows are places [A] here."""
        clients, places = self.training()
        for rows, batch in clients.samples(limit):
            yield places[rows], batch

    def validation_samples(self, limit: int = 512) -> Iterator[tuple[Tensor, Batch]]:
        """Yields what `samples` yields for the validation split; the rows are places [A] here."""
        if self.data.poisson is not None:
            raise ConfigError(
                "loop.sample_privacy: the method looks at its validation samples; take another "
                "method"
            )
        clients, places = self._in_split("val")
        for rows, batch in clients.samples(limit):
            yield places[rows], batch

    def samples(self, limit: int = 512) -> Iterator[tuple[slice, Batch]]:
        """Yields every sample once, in order, at most `limit` of each client at a time.

        Yields:
            The rows that still have samples, and their batch.
        """
        sizes = self.sizes
        if self.data.poisson is not None and self.split == "train":
            raise ConfigError(
                "loop.sample_privacy: the method looks at its training samples beside their "
                "gradients; take another method"
            )
        if not len(self) or not sizes.any():
            return
        indices, begins = self.data.owned(self.split, self.ids)
        starts = torch.from_numpy(begins).to(indices.device)
        for begin in range(0, int(sizes.max()), limit):
            active = int((sizes > begin).sum())
            counts = np.minimum(sizes[:active] - begin, limit)
            columns = begin + torch.arange(int(counts.max()), device=starts.device)
            last = torch.from_numpy(sizes[:active] - 1).to(starts.device)[:, None]
            index = indices[starts[:active, None] + torch.minimum(columns, last)]
            owners = self.ids[:active, None]
            inputs, targets = self.data.gather(index, self.dtype, owners)
            if self.split == "train":
                inputs, targets = self.data.add_poison(
                    inputs.flatten(0, 1), targets.flatten(0, 1), index, owners, self.round
                )
                inputs = inputs.unflatten(0, index.shape)
                targets = targets.unflatten(0, index.shape)
            yield slice(0, active), Batch(inputs, targets, counts.tolist())

    def pooled(self, limit: int) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Yields all clients' samples one after another, at most `limit` at a time.

        Yields:
            The rows that own the samples, and the indices of the samples.
        """
        indices, starts = self.data.owned(self.split, self.ids)
        owners, nth = sample_order.ragged_arange(self.sizes)
        places = starts[owners] + nth
        for begin in range(0, len(owners), limit):
            part = slice(begin, begin + limit)
            yield owners[part], indices[torch.from_numpy(places[part]).to(indices.device)]


@dataclass(frozen=True)
class StepOrigin(Origin):
    """The clients, the round and the local step of a batch; created in every step, used rarely.

    Attributes:
        base: The key of the draws of this round and purpose.
        ids: Ids of the clients, int64 [C].
        round: The round, from 0.
        per_epoch: Local steps in an epoch, int64 [C].
        first, step: The local step is `first + step`, from 0.
    """

    base: int
    ids: np.ndarray
    round: int
    per_epoch: np.ndarray
    first: int
    step: int

    def seed(self, row: int) -> int:
        return key(self.base, int(self.ids[row]), self.first + self.step)

    def describe(self, row: int) -> str:
        epoch, step = divmod(self.first + self.step, int(self.per_epoch[row]))
        who = f"client {self.ids[row]} in round {self.round + 1}"
        return f"{who}, epoch {epoch + 1}, step {step + 1}"


@dataclass(frozen=True)
class PoissonOrigin(StepOrigin):
    """The origin of a mini-batch whose samples were drawn on their own.

    Attributes:
        expected: The expected number of samples of each client's row, int64 [C].
        batch_size: That of the schedule.
    """

    expected: np.ndarray | None = None
    batch_size: int | None = None


def _long(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int64))
