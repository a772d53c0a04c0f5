"""The federated loop: who trains in which round, in which chunk, on which process.

One Lightning epoch is one round, and one Lightning batch is a chunk of the round's cohort, so that
the stock Trainer runs the whole federation.
"""

from __future__ import annotations

import heapq
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule

from datamodules import FederatedDataModule
from datamodules.errors import check_whole, require
from datamodules.randomness import generator
from pfl.clients import ClientData, Clients
from pfl.clients.store import ClientStore
from pfl.errors import ConfigError

Split = Literal["val", "test"]


class FederatedLoop(LightningDataModule):
    """Feeds the Trainer with cohorts of clients.

    Args:
        datamodule: The data, whose samples the clients own.
        clients_per_round: How many clients train in a round; None: everyone.
        sampling: How the cohort of a round is drawn: "uniform", a fixed number without replacement;
            "bernoulli", each client on its own with probability clients_per_round / M, drawn again
            if no client takes part; "weighted", a fixed number without replacement with
            probabilities proportional to the number of training samples (drawn one after another).
        trace: Given cohorts that replace the sampling: a list of lists of client ids, one for each
            round, or the path of a JSON file with such a list. A round may be empty.
        clients_at_once: How many clients are trained together as the rows of one matrix; None: as
            many as fit comfortably. It changes speed and memory, never results.
        state_memory: GiB of this machine's memory, a GPU's included, that client states may take
            before they go to files in the system's temporary folder; None: a quarter of the free
            memory of a GPU and half of the free memory of the machine.
        state_dtype: The dtype in which client states are stored. "float16" (up to 65504) and
            "bfloat16" (2 to 3 digits) halve the memory and round the states. None: the model's.
        evaluate: The splits that are evaluated during `fit`; a split without samples is left out.
        seed: The seed of client sampling and of the order of samples; None: the data module's.

    Raises:
        ConfigError: A value is impossible, or no clients own the samples of the data.

    Example:
        >>> from datamodules import Dirichlet, DigitsDataModule
        >>> data = DigitsDataModule(num_clients=20, partition=Dirichlet(0.1))
        >>> loop = FederatedLoop(data, clients_per_round=5, seed=1)
        >>> len(loop.cohort(0))
        5
        >>> loop.cohort(0).tolist() == loop.cohort(1).tolist()  # every round has its own cohort
        False
    """

    def __init__(
        self,
        datamodule: FederatedDataModule,
        clients_per_round: int | None = None,
        sampling: Literal["uniform", "bernoulli", "weighted"] = "uniform",
        trace: str | Sequence[Sequence[int]] | None = None,
        clients_at_once: int | None = None,
        state_memory: float | None = None,
        state_dtype: Literal["float32", "float16", "bfloat16"] | None = None,
        evaluate: Sequence[Split] = ("val", "test"),
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(datamodule, FederatedDataModule):
            raise ConfigError(
                f"datamodule: {type(datamodule).__name__}; FederatedLoop takes a "
                f"FederatedDataModule, whose samples clients own"
            )
        self.datamodule = datamodule
        self.clients_per_round = clients_per_round
        self.sampling = sampling
        self.clients_at_once = clients_at_once
        self.state_memory = state_memory
        self.state_dtype: torch.dtype | None = getattr(torch, state_dtype or "", None)
        self.evaluate = tuple(evaluate)
        self._seed = seed
        self.trace = _read_trace(trace)
        # The algorithm sets these at its own set-up: whether it has client states, how many clients
        # train together, and the relative costs of a round for clients of some sizes.
        self.stateful = True
        self.chunk_size = clients_at_once or sys.maxsize
        self.cost: Callable[[np.ndarray], np.ndarray] = np.asarray
        self._data: ClientData | None = None
        self.store: ClientStore | None = None  # the algorithm's, once a run has begun
        samplings, dtypes = ("uniform", "bernoulli", "weighted"), ("float32", "float16", "bfloat16")
        require("loop.sampling", sampling, sampling in samplings, f"one of {', '.join(samplings)}")
        count, limit = clients_per_round, datamodule.num_clients
        require(
            "loop.clients_per_round",
            count,
            count is None or _whole(count),
            f"a whole number from 1 to {limit} (data.num_clients), or null for everyone",
        )
        if clients_at_once is not None:
            check_whole("loop.clients_at_once", clients_at_once)
        possible = state_memory is None or 0 <= state_memory < float("inf")
        require("loop.state_memory", state_memory, possible, "at least 0 (GiB), or null")
        is_dtype = state_dtype is None or state_dtype in dtypes
        require("loop.state_dtype", state_dtype, is_dtype, f"{', '.join(dtypes)} or null")
        unknown = sorted(set(self.evaluate) - {"val", "test"})
        require("loop.evaluate", unknown, not unknown, "val, test or both")
        if seed is not None:
            check_whole("loop.seed", seed, 0)

    # ---- set-up -------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Downloads the data set, if it needs a download."""
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Partitions the data, and checks the loop's own arguments against them."""
        self.datamodule.setup(stage)
        total, count = self.num_clients, self.clients_per_round
        if count is not None and not 1 <= count <= total:
            raise ConfigError(
                f"loop.clients_per_round: {count}; it must be from 1 to {total} "
                f"(data.num_clients), or null for everyone"
            )
        able = int((self.datamodule.client_sizes > 0).sum())
        if self.trace is None and self.sampling == "weighted" and able < self.cohort_size:
            raise ConfigError(
                f"loop.clients_per_round: {count}; weighted sampling draws clients with samples, "
                f"and only {able} have some"
            )
        rounds = self.trainer.max_epochs if self.trainer is not None and stage == "fit" else None
        if self.trace is not None and rounds is not None and rounds > len(self.trace):
            raise ConfigError(
                f"trainer.max_epochs: {rounds}; loop.trace has only {len(self.trace)} rounds, "
                f"set it to at most that"
            )
        for number, cohort in enumerate(self.trace or ()):
            whole = all(_whole(client) for client in cohort)
            known = whole and all(0 <= client < total for client in cohort)
            if not known or len(set(cohort)) < len(cohort):
                raise ConfigError(
                    f"loop.trace: round {number} has {list(cohort)}; it must hold different "
                    f"client ids from 0 to {total - 1}"
                )

    def on_exception(self, exception: BaseException) -> None:
        """Restores the process after an error, since Lightning then tears nothing down."""
        if self.trainer is not None:
            self.trainer.lightning_module.teardown("fit")

    @property
    def seed(self) -> int:
        """The seed of client sampling and of the order of samples."""
        return self.datamodule.seed if self._seed is None else self._seed

    @property
    def num_clients(self) -> int:
        """M, the number of clients in the population."""
        return self.datamodule.num_clients

    def client_data(self, device: torch.device) -> ClientData:
        """Returns the clients' samples on a device, to which they are moved once."""
        if self._data is None or self._data.device != device:
            self._data = ClientData(self.datamodule, device, self.seed)
        return self._data

    def client_store(self, device: torch.device) -> ClientStore:
        """Returns a new store for client states, with this loop's share of the memory."""
        memory = None if self.state_memory is None else int(self.state_memory * 2**30)
        processes = self.trainer.num_devices if self.trainer else 1
        return ClientStore(
            self.num_clients,
            device=device,
            memory=memory,
            processes=processes,
            sharing=self.sharing,
        )

    @property
    def sharing(self) -> int:
        """Number of processes that share a device."""
        strategy = self.trainer.strategy if self.trainer else None
        return getattr(strategy, "processes_per_device", 1)

    def __str__(self) -> str:
        # Lightning's own goes through the loaders, which have chunks only during a run.
        data, count = type(self.datamodule).__name__, self.clients_per_round
        return f"{type(self).__name__}({data}, clients_per_round={count})"

    def describe(self) -> str:
        """Returns the protocol in words: that of the data, and who trains in a round."""
        if self.trace is not None:
            who = f"a replayed trace of {len(self.trace)} rounds"
        elif self.cohort_size == self.num_clients:
            who = "all clients"
        else:
            who = f"{self.cohort_size} clients a round, {self.sampling} sampling"
        return f"{self.datamodule.describe()} Training: {who}; seed {self.seed}."

    # ---- who trains ---------------------------------------------------------------------------

    def require_all_clients(self, method: str) -> None:
        """Raises a ConfigError if a round that is not empty has some of the clients only."""
        key, sizes = "clients_per_round", [self.cohort_size]
        if self.trace is not None:
            key, sizes = "trace", [len(cohort) for cohort in self.trace]
        if some := [size for size in sizes if size not in (0, self.num_clients)]:
            raise ConfigError(
                f"loop.{key}: {some[0]}; {method} needs all {self.num_clients} clients in every "
                f"round, use null"
            )

    @property
    def cohort_size(self) -> int:
        """Number of clients in a round: the exact number, or the expected one (Bernoulli)."""
        if self.trace is not None:
            return max(map(len, self.trace), default=0)
        return self.num_clients if self.clients_per_round is None else self.clients_per_round

    def cohort(self, round_index: int) -> np.ndarray:
        """Returns the ids of the clients that train in a round, int64, ascending.

        The cohort is a function of (seed, round).
        """
        if self.trace is not None:
            return np.sort(np.asarray(self.trace[round_index], np.int64))
        total, size = self.num_clients, self.cohort_size
        if size == total:
            return np.arange(total)
        rng = generator(self.seed, "cohort", round_index)
        if self.sampling == "bernoulli":
            while not (chosen := rng.random(total) < size / total).any():
                pass
            return np.flatnonzero(chosen)
        weights = None
        if self.sampling == "weighted":
            sizes = self.datamodule.client_sizes
            weights = sizes / sizes.sum()
        return np.sort(rng.choice(total, size, replace=False, p=weights))

    def chunks(self, ids: np.ndarray, split: str, count: int, *, owned: bool) -> list[np.ndarray]:
        """Returns this process's share of some clients in chunks, largest clients first.

        Args:
            ids: The clients.
            split: The split whose samples are used.
            count: Number of chunks; superfluous chunks are empty and come last.
            owned: True: a client belongs to the process id % world_size, which has the rows of its
                states. False: clients are assigned by cost, so that processes finish together.
        """
        rank, world = self._rank()
        sizes = self._split_sizes(split)[ids]
        order = np.argsort(-sizes, kind="stable")
        mine = ids[order]
        if owned:
            mine = mine[mine % world == rank]
        elif world > 1:
            limit = max(count * self.chunk_size, -(-len(ids) // world))
            mine = mine[assign_clients(self.cost(sizes[order]), world, limit) == rank]
        needed = min(count, max(1, -(-len(mine) // self.chunk_size)))
        return np.array_split(mine, needed) + [mine[:0]] * (count - needed)

    def _split_sizes(self, split: str) -> np.ndarray:
        return getattr(self.datamodule.partition, split).sizes

    def _rank(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    # ---- loaders ------------------------------------------------------------------------------

    def train_dataloader(self) -> ChunkLoader:
        """Returns the chunks of the current round's cohort."""
        return ChunkLoader(self, ["train"])

    def val_dataloader(self) -> ChunkLoader | list[Any]:
        """Returns chunks of all clients, for every evaluated split that has samples."""
        splits = [s for s in self.evaluate if self._split_sizes(s).any()]
        return ChunkLoader(self, splits) if splits else []

    def test_dataloader(self) -> ChunkLoader:
        """Returns chunks of all clients, with their test samples."""
        if not self._split_sizes("test").any():
            raise ConfigError("data.protocol: no client has a test sample; give it a test share")
        return ChunkLoader(self, ["test"])

    predict_dataloader = test_dataloader

    def transfer_batch_to_device(self, batch: Any, device: torch.device, _: int) -> Any:
        """Returns the chunk itself, which reads its samples on the device."""
        return batch


class ChunkLoader:
    """An iterable over chunks of clients, with the same length in every round and process."""

    def __init__(self, loop: FederatedLoop, splits: Sequence[str]) -> None:
        self.loop, self.splits = loop, splits

    def __len__(self) -> int:
        return len(self.splits) * self._chunks_per_split()

    def _chunks_per_split(self) -> int:
        loop, (_, world) = self.loop, self.loop._rank()
        clients = loop.cohort_size if "train" in self.splits else loop.num_clients
        share = -(-clients // world)
        if loop.stateful:  # one process may own all clients of the cohort
            share = min(clients, -(-loop.num_clients // world))
        return max(1, -(-share // loop.chunk_size))

    def __iter__(self) -> Iterator[Clients]:
        # A generator, since after a resume Lightning calls iter() before it has set the round.
        loop, count = self.loop, self._chunks_per_split()
        trainer = loop.trainer
        assert trainer is not None
        for split in self.splits:
            round_index = trainer.current_epoch
            ids = loop.cohort(round_index) if split == "train" else np.arange(loop.num_clients)
            data = loop.client_data(trainer.strategy.root_device)
            owned = loop.stateful or split != "train"
            chunks = loop.chunks(ids, split, count, owned=owned)
            for number, chunk in enumerate(chunks):
                if loop.store is not None and number + 1 < count:
                    loop.store.prefetch(chunks[number + 1])
                yield Clients(
                    chunk, round_index, data, split, first=number == 0, last=number == count - 1
                )


def assign_clients(costs: np.ndarray, world: int, limit: int) -> np.ndarray:
    """Returns the process of each client, int64 [C], by longest processing time first (LPT).

    In the order of falling cost, each client goes to the process with the smallest load so far. The
    last process then ends at most 4/3 - 1/(3 world) times as late as with the best assignment
    (Graham 1969); in practice the difference is below 1% (docs/many-devices.md).

    Args:
        costs: The clients' costs, [C].
        world: Number of processes.
        limit: The largest number of clients that a process may have.
    """
    owners = np.empty(len(costs), np.int64)
    loads = [(0.0, 0, rank) for rank in range(world)]  # a process's cost, clients and rank
    for client in np.argsort(-costs, kind="stable").tolist():
        load, clients, rank = heapq.heappop(loads)
        owners[client] = rank
        if clients + 1 < limit:
            heapq.heappush(loads, (load + float(costs[client]), clients + 1, rank))
    return owners


def _whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _read_trace(trace: str | Sequence[Sequence[int]] | None) -> Sequence[Sequence[int]] | None:
    if not isinstance(trace, str):
        return trace
    try:
        rounds = json.loads(Path(trace).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"loop.trace: {trace} cannot be read as JSON: {error}") from error
    if not (isinstance(rounds, list) and all(isinstance(r, list) for r in rounds)):
        raise ConfigError(f"loop.trace: {trace} must hold a list of lists of client ids")
    return rounds
