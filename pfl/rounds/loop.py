"""The federated loop: who trains in which round, in which chunks, on which process.

One Lightning epoch is one round, and one Lightning batch is a chunk of that round's cohort, so
that the stock Trainer runs the whole federation.
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
from pfl.clients import ClientData, Clients
from pfl.clients.store import ClientStore
from pfl.errors import ConfigError
from pfl.randomness import generator

Split = Literal["val", "test"]


class FederatedLoop(LightningDataModule):
    """Feeds the Trainer with cohorts of clients.

    Args:
        datamodule: Whose samples the clients own.
        clients_per_round: How many clients train in a round; None: everyone.
        sampling: How the cohort of a round is drawn: "uniform", a fixed number without replacement;
            "bernoulli", each client on its own with probability clients_per_round / M, drawn again
            if nobody takes part; "weighted", a fixed number without replacement with probabilities
            proportional to the number of training samples (drawn one after another).
        trace: Replays given cohorts instead: a list of lists of client ids, one for each round, or
            the path of a JSON file with such a list. A round may be empty.
        clients_at_once: How many clients are trained together as the rows of one matrix; None: as
            many as fit comfortably. Changes speed and memory, never results.
        state_memory: GiB of this machine's memory that what clients remember may take, a GPU's
            included, before it goes to files in the system's temporary folder; None: a quarter of
            what is free on a GPU and half of what else is free.
        state_dtype: In which it is stored; "float16" (up to 65504) and "bfloat16" (2 to 3 digits)
            take half of the memory and round it. None: as the model.
        evaluate: Which splits are evaluated during `fit`; a split without samples is left out.
        seed: Of client sampling and of the order of their samples; None: the datamodule's seed.

    Raises:
        ConfigError: For values that cannot be, and data that no clients own.
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
        # The algorithm says these when it is set up: whether clients keep something between rounds,
        # and what a round costs clients of some sizes, relative to each other.
        self.stateful = True
        self.chunk_size = clients_at_once or sys.maxsize  # the algorithm chooses one if left open
        self.cost: Callable[[np.ndarray], np.ndarray] = np.asarray
        self._data: ClientData | None = None
        self.store: ClientStore | None = None  # the algorithm's, once it has one
        if sampling not in ("uniform", "bernoulli", "weighted"):
            raise ConfigError(
                f"loop.sampling: {sampling!r} is unknown; choose uniform, bernoulli or weighted"
            )
        if clients_per_round is not None and not _whole(clients_per_round):
            raise ConfigError(
                f"loop.clients_per_round: {clients_per_round!r}; it must be a whole number from "
                f"1 to {datamodule.num_clients} (data.num_clients), or null for everyone"
            )
        if clients_at_once is not None and clients_at_once < 1:
            raise ConfigError(f"loop.clients_at_once: {clients_at_once}; it must be at least 1")
        if state_memory is not None and not 0 <= state_memory < float("inf"):
            raise ConfigError(
                f"loop.state_memory: {state_memory}; it must be at least 0 (GiB), or null"
            )
        if state_dtype not in (None, "float32", "float16", "bfloat16"):
            raise ConfigError(
                f"loop.state_dtype: {state_dtype!r}; choose float32, float16 or bfloat16, or null"
            )
        if unknown := set(self.evaluate) - {"val", "test"}:
            raise ConfigError(f"loop.evaluate: {sorted(unknown)}; choose from val and test")

    # ---- set-up -------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download, where the data set needs it."""
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Partition the data, and check the loop's own arguments against it."""
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
        """Leave the process as it was: after an error Lightning tears nothing down."""
        if self.trainer is not None:
            self.trainer.lightning_module.teardown("fit")

    @property
    def seed(self) -> int:
        """Of client sampling and of the order of samples."""
        return self.datamodule.seed if self._seed is None else self._seed

    @property
    def num_clients(self) -> int:
        """M, the population."""
        return self.datamodule.num_clients

    def client_data(self, device: torch.device) -> ClientData:
        """The samples on a device; moved once."""
        if self._data is None or self._data.device != device:
            self._data = ClientData(self.datamodule, device, self.seed)
        return self._data

    def client_store(self, device: torch.device) -> ClientStore:
        """A new store for what clients remember, with this loop's share of the memory."""
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
        """How many processes share a device."""
        strategy = self.trainer.strategy if self.trainer else None
        return getattr(strategy, "processes_per_device", 1)

    def __str__(self) -> str:
        """Lightning's goes through the loaders, whose chunks only a run has."""
        data, count = type(self.datamodule).__name__, self.clients_per_round
        return f"{type(self).__name__}({data}, clients_per_round={count})"

    def describe(self) -> str:
        """The protocol in words: the data's, and who trains in a round."""
        if self.trace is not None:
            who = f"a replayed trace of {len(self.trace)} rounds"
        elif self.cohort_size == self.num_clients:
            who = "all clients"
        else:
            who = f"{self.cohort_size} clients a round, {self.sampling} sampling"
        return f"{self.datamodule.describe()} Training: {who}; seed {self.seed}."

    # ---- who trains ---------------------------------------------------------------------------

    @property
    def cohort_size(self) -> int:
        """How many clients take part in a round: exactly, or at least as expected (Bernoulli)."""
        if self.trace is not None:
            return max(map(len, self.trace), default=0)
        return self.num_clients if self.clients_per_round is None else self.clients_per_round

    def cohort(self, round_index: int) -> np.ndarray:
        """Ids of the clients that train in a round, ascending: a function of (seed, round)."""
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
        """This process's share of some clients, in `count` chunks, largest clients first.

        Clients that keep state between rounds (`owned`) stay on the process id % world_size, which
        has their rows; others are dealt out by what they cost, so that processes finish together.
        Chunks that are not needed are the last ones, and empty.
        """
        rank, world = self._rank()
        sizes = self._split_sizes(split)[ids]
        order = np.argsort(-sizes, kind="stable")
        mine = ids[order]
        if owned:
            mine = mine[mine % world == rank]
        elif world > 1:
            most = max(count * self.chunk_size, -(-len(ids) // world))
            mine = mine[assign_clients(self.cost(sizes[order]), world, most) == rank]
        needed = min(count, max(1, -(-len(mine) // self.chunk_size)))
        return np.array_split(mine, needed) + [mine[:0]] * (count - needed)

    def _split_sizes(self, split: str) -> np.ndarray:
        return getattr(self.datamodule.partition, split).sizes

    def _rank(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    # ---- what Lightning asks for --------------------------------------------------------------

    def train_dataloader(self) -> ChunkLoader:
        """The chunks of the current round's cohort."""
        return ChunkLoader(self, ["train"])

    def val_dataloader(self) -> ChunkLoader | list[Any]:
        """All clients, for every split that is evaluated during `fit` and has samples."""
        splits = [s for s in self.evaluate if self._split_sizes(s).any()]
        return ChunkLoader(self, splits) if splits else []

    def test_dataloader(self) -> ChunkLoader:
        """All clients, with their test samples."""
        if not self._split_sizes("test").any():
            raise ConfigError("data.protocol: no client has a test sample; give it a test share")
        return ChunkLoader(self, ["test"])

    predict_dataloader = test_dataloader

    def transfer_batch_to_device(self, batch: Any, device: torch.device, _: int) -> Any:
        """Chunks read their samples on the device themselves."""
        return batch


class ChunkLoader:
    """Iterates over chunks of clients; its length is the same in every round and process."""

    def __init__(self, loop: FederatedLoop, splits: Sequence[str]) -> None:
        self.loop, self.splits = loop, splits

    def __len__(self) -> int:
        return len(self.splits) * self._chunks_per_split()

    def _chunks_per_split(self) -> int:
        loop, world = self.loop, self.loop._rank()[1]
        clients = loop.cohort_size if "train" in self.splits else loop.num_clients
        share = -(-clients // world)
        if loop.stateful:  # one process may own them all
            share = min(clients, -(-loop.num_clients // world))
        return max(1, -(-share // loop.chunk_size))

    def __iter__(self) -> Iterator[Clients]:
        # A generator: Lightning calls iter() before the round number is right after a resume.
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


def assign_clients(costs: np.ndarray, world: int, most: int) -> np.ndarray:
    """The process of each client: the dearest first, each to the process with the least so far.

    With this rule (Graham 1969) the last process ends at most 4/3 - 1/(3 world) times as late as
    with the best assignment; in practice the difference is below 1% (docs/many-devices.md).

    Args:
        costs: Of the clients.
        world: Number of processes.
        most: How many clients a process may have at most.
    """
    owners = np.empty(len(costs), np.int64)
    loads = [(0.0, 0, rank) for rank in range(world)]  # cost, clients and number of a process
    for client in np.argsort(-costs, kind="stable").tolist():
        load, clients, rank = heapq.heappop(loads)
        owners[client] = rank
        if clients + 1 < most:
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
