"""The federated loop: a LightningDataModule, because Lightning asks one for its batches: cohorts.

One Lightning epoch is one round, and its one Lightning batch is the round's cohort, so that the
stock Trainer runs the whole federation. The loop says who trains in which round, in which chunk and
on which process.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torchmetrics import Metric

from pfl.aggregation.attacks import Attackers
from pfl.aggregation.privacy import Privacy, SamplePrivacy
from pfl.aggregation.robust import Rule
from pfl.clients import ClientData, Clients, LocalSchedule
from pfl.clients.store import ClientStore
from pfl.datamodules import FederatedDataModule
from pfl.datamodules.errors import require_value
from pfl.datamodules.ranges import Checked, Count, CountOrZero, NonNegative, Positive, ProperShare
from pfl.errors import ConfigError
from pfl.machine import runs_here, runs_on_card
from pfl.randomness import DrawKey, Secret, Seeded
from pfl.rounds.clock import Clock
from pfl.rounds.cohort import Cohort
from pfl.rounds.participation import WHOLE, Cost, Participation, Present, Sampling
from pfl.scores.evaluation import Finetuning
from pfl.scores.metrics import ClientMetrics
from pfl.scores.neighbours import Neighbours
from pfl.stages.stage import Stage

Split = Literal["train", "val", "test"]


class FederatedLoop(Checked, LightningDataModule):
    """Feeds the Trainer with cohorts of clients.

    Args:
        datamodule: The data, whose samples the clients own.
        clients_per_round: How many clients train in a round; None: everyone.
        sampling: How the cohort of a round is drawn: "uniform", a fixed number without replacement;
            "bernoulli", each client on its own with probability clients_per_round / M, drawn again
            if no client takes part, unless `privacy` is given; "weighted", a fixed number without
            replacement with probabilities proportional to the number of training samples (drawn
            one after another); "cyclic", groups of clients that were drawn once and take turns.
        trace: Given cohorts that replace the sampling: a list of lists of clients, one for each
            round, or the path of a JSON file with such a list. A round may be empty. Here and below
            clients are given by their ids, or by their names (texts) where they have names.
        unseen: Clients that never train, for an evaluation on newcomers: a share of all clients,
            which is drawn once; a list of clients; or the path of a JSON file with such a list.
            They are in no cohort, and `clients_per_round: null` means all others.
        dropout: Clients of the cohort that fail after their training, so that their messages never
            arrive: the probability of each, or a list of clients for each round, or the path of a
            JSON file with such lists (docs/participation.md).
        stragglers: Clients of the cohort that take only a part of their local steps, as `dropout`.
        straggler_work: The share of their local steps that stragglers take, rounded up.
        by_client: What differs by client, under its name, or its number where clients have no
            names: `work`, a factor on its local steps (2 epochs in place of 1), and `rate`, a
            factor on its learning rate; or the path of a JSON file with the same.
        clock: How fast clients are, for virtual time; None: no time is counted
            (docs/participation.md).
        privacy: Client-level differential privacy of all that the server and other clients receive;
            None: none (docs/privacy.md).
        sample_privacy: Sample-level differential privacy of all that clients send or keep; None:
            none (docs/privacy.md).
        aggregation: What replaces the mean of the clients' messages, such as `Median`, against
            attackers; None: the mean (docs/robustness.md).
        attackers: Clients that send, or train on, something else than they should; None: nobody.
        stages: What acts on the clients' messages before the server reads them, such as `TopK`: a
            list of `pfl.stages.stage.Stage` (docs/stages.md).
        clients_at_once: How many clients are trained together as the rows of one matrix; None: as
            many as fit comfortably. It changes speed and memory, never results.
        state_memory: GiB of this machine's memory, a GPU's included, that client states may take
            before they go to files in the system's temporary folder; None: a quarter of the free
            memory of a GPU and half of the free memory of the machine.
        state_dtype: The dtype in which client states are stored. "float16" (up to 65504) and
            "bfloat16" (2 to 3 digits) halve the memory and round the states. None: the model's.
        evaluate: The splits that are evaluated during `fit`; a split without samples is left out.
            With "train" in the list `metrics.csv` has the scores on the clients' training samples,
            such as `train/global/accuracy`, beside the loss of their local steps, `train/loss`.
        finetune: Numbers of local steps after which every client's model is scored in each
            evaluation, such as [0, 1, 5]. Each number starts at the client's best model, and
            nothing of these steps remains (docs/participation.md).
        finetune_lr: The learning rate of these steps; None: the method's.
        neighbours: kNN-Per: every client's best model is also scored together with a memory of the
            client's training samples; None: it is not (docs/participation.md).
        metrics: Metrics of torchmetrics that are computed for each client beside accuracy and loss:
            a list, or a dict of names (docs/metrics.md).
        select_by: The validation score that chooses the `best` round in `summary.json`: "accuracy",
            "loss", or one of `metrics`, perhaps with the model whose score counts, such as
            "finetuned/5/accuracy" or "global/loss". None: the accuracy, or the loss for regression;
            of models after the most steps of `finetune`, of personalized models, or else of the
            global one.
        seed: The seed of client sampling and of the order of samples; None: the data module's.

    Raises:
        ConfigError: A value is impossible, or no clients own the samples of the data.

    Example:
        >>> from pfl.datamodules import Dirichlet, DigitsDataModule
        >>> data = DigitsDataModule(num_clients=20, partition=Dirichlet(0.1))
        >>> loop = FederatedLoop(data, clients_per_round=5, seed=1)
        >>> len(loop.cohort(0))
        5
        >>> loop.cohort(0).tolist() == loop.cohort(1).tolist()  # every round has its own cohort
        False
    """

    argument_group = "loop"

    def __init__(
        self,
        datamodule: FederatedDataModule,
        clients_per_round: int | None = None,
        sampling: Sampling = "uniform",
        trace: str | Sequence[Sequence[str | int]] | None = None,
        unseen: float | str | Sequence[str | int] | None = None,
        dropout: float | str | Sequence[Sequence[str | int]] = 0.0,
        stragglers: float | str | Sequence[Sequence[str | int]] = 0.0,
        straggler_work: ProperShare = 0.5,
        by_client: str | dict[str, dict[str, float]] | None = None,
        clock: Clock | None = None,
        privacy: Privacy | None = None,
        sample_privacy: SamplePrivacy | None = None,
        aggregation: Rule | None = None,
        attackers: Attackers | None = None,
        stages: Sequence[Stage] = (),
        clients_at_once: Count | None = None,
        state_memory: NonNegative | None = None,
        state_dtype: Literal["float32", "float16", "bfloat16"] | None = None,
        evaluate: Sequence[Split] = ("val", "test"),
        finetune: int | Sequence[int] | None = None,
        finetune_lr: Positive | None = None,
        neighbours: Neighbours | None = None,
        metrics: list[Metric] | dict[str, Metric] | None = None,
        select_by: str | None = None,
        seed: CountOrZero | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(datamodule, FederatedDataModule):
            raise ConfigError(
                f"datamodule: {type(datamodule).__name__}; FederatedLoop takes a "
                f"FederatedDataModule, whose samples clients own"
            )
        self.datamodule = datamodule
        seed = datamodule.seed if seed is None else seed
        self.participation = Participation(
            datamodule,
            seed,
            clients_per_round=clients_per_round,
            sampling=sampling,
            trace=trace,
            unseen=unseen,
            dropout=dropout,
            stragglers=stragglers,
            straggler_work=straggler_work,
            by_client=by_client,
            privacy=privacy,
            aggregation=aggregation,
            attackers=attackers,
            clock=clock,
        )
        self.stages = list(stages)
        self.secret: Secret | None = None
        if any(one is not None and not one.reproducible for one in (privacy, sample_privacy)):
            self.take_secret(Secret())
        self.sample_privacy = sample_privacy
        for key, value in {"finetune": finetune, "neighbours": neighbours}.items():
            if sample_privacy is not None and value:
                raise ConfigError(
                    f"loop.{key}: {value}; loop.sample_privacy does not count what evaluations do "
                    f"with training samples; give null"
                )
        if sample_privacy is not None and "train" in evaluate:
            raise ConfigError(
                "loop.evaluate: train; loop.sample_privacy does not count what scores tell of "
                "training samples; give val, test or both"
            )
        self.neighbours = neighbours
        self.clients_at_once = clients_at_once
        self.state_memory = state_memory
        self.state_dtype: torch.dtype | None = getattr(torch, state_dtype or "", None)
        self.evaluate = tuple(evaluate)
        self.finetuning = Finetuning.read(finetune, finetune_lr)
        self.metrics = ClientMetrics.read(metrics)
        self.metrics.check_score("loop.select_by", select_by, self.finetuning.steps)
        self.select_by = select_by
        self.plan(clients_at_once or sys.maxsize, stateful=True, cost=np.asarray)
        self._data: ClientData | None = None
        self._store: ClientStore | None = None  # of the run, once it has begun
        holds = state_memory is None or state_memory < 2**63
        require_value("loop.state_memory", state_memory, holds, "below 2**63 (GiB)")
        unknown = sorted(set(self.evaluate) - {"train", "val", "test"})
        require_value("loop.evaluate", unknown, not unknown, "some of train, val and test")

    # ---- set-up -------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Partitions the data, and checks the loop's own arguments against them."""
        self.datamodule.setup(stage)
        rounds = self.trainer.max_epochs if self.trainer is not None and stage == "fit" else None
        self.participation.check(rounds)

    def plan(
        self,
        chunk_size: int,
        *,
        stateful: bool,
        cost: Cost,
        schedule: LocalSchedule = WHOLE,
        buffer: int | None = None,
        pooled: bool = False,
    ) -> None:
        """Sets how cohorts are cut into chunks.

        Args:
            chunk_size: How many clients train together.
            stateful: Whether a client stays on the process that has its rows.
            cost: Gives the relative costs of a round for clients of some sizes.
            schedule: The local steps of a round.
            buffer: How many messages end a round of a server that waits for no cohort.
            pooled: Whether the samples of all clients are in one place, so that no virtual time is
                counted.
        """
        self.chunk_size = chunk_size
        self.stateful = stateful
        self.cost = cost
        self._pooled = pooled
        self.participation.pace(cost, schedule, buffer)

    def on_exception(self, exception: BaseException) -> None:
        """Restores the process after an error, since Lightning then tears nothing down."""
        if self.trainer is not None:
            self.trainer.lightning_module.teardown("fit")

    @property
    def seed(self) -> int:
        """The seed of client sampling and of the order of samples."""
        return self.participation.seed

    @property
    def num_clients(self) -> int:
        """The number of all clients, those that never train included."""
        return self.datamodule.num_clients

    @property
    def unseen_clients(self) -> np.ndarray:
        """The ids of the clients that never train, ascending int64."""
        return self.participation.unseen_clients

    @property
    def population(self) -> np.ndarray:
        """The ids of all other clients, from which cohorts are drawn, ascending int64 [M]."""
        return self.participation.population

    def client_data(self, device: torch.device) -> ClientData:
        """Returns the clients' samples on a device, to which they are moved once."""
        if self._data is None or self._data.device != device:
            poison = self.participation if self.participation.poisons else None
            self._data = ClientData(self.datamodule, device, self.seed, poison)
        return self._data

    def name_of(self, client: int) -> str:
        """Returns a client in words: "client 1", or "client 1 (south)" if it has a name."""
        name = f"client {client}"
        known = self.datamodule.client_names
        if known is not None and known[client] != str(client):
            name += f" ({known[client]})"
        return name

    def training_targets(self, client: int) -> Tensor:
        """Returns the targets of a client's training samples [n, ...], in the order of time."""
        return torch.from_numpy(self.datamodule.training_targets(client))

    def own_unit(self, client: int, values: Tensor) -> Tensor:
        """Returns targets or predictions of a client, [n, ...], in the unit of the data's file."""
        return self.datamodule.own_unit(client, values)

    def take_secret(self, secret: Secret) -> None:
        """Draws noise and private cohorts from a secret key, in place of the loop's own key."""
        self.secret = secret
        self.participation.draw_from(secret)

    @property
    def sample_draws(self) -> DrawKey:
        """Where the noise and the mini-batches of sample-level privacy come from."""
        if self.secret is None or self.sample_privacy is None or self.sample_privacy.reproducible:
            return Seeded(self.seed)
        return self.secret

    def connect(self, present: Present) -> None:
        """Has every round's cohort made of those of the drawn clients that are there.

        Args:
            present: Returns these of (round, drawn ids). The clients are parties, and train one by
                one.
        """
        self.participation.limit_to(present)
        self.clients_at_once = 1

    def read_ahead_from(self, store: ClientStore) -> None:
        """Has the rows of the next chunk read while a chunk is evaluated."""
        self._store = store

    def client_store(self, device: torch.device) -> ClientStore:
        """Returns a new store for client states, with this loop's share of the memory."""
        memory = None if self.state_memory is None else int(self.state_memory * 2**30)
        processes = self.trainer.num_devices if self.trainer else 1
        if memory is None:
            processes *= runs_here()
        share = {"memory": memory, "processes": processes, "sharing": self.sharing}
        return ClientStore(self.num_clients, device=device, **share)

    @property
    def sharing(self) -> int:
        """Number of processes that share a device, those of runs beside this one included."""
        strategy = self.trainer.strategy if self.trainer else None
        return getattr(strategy, "processes_per_device", 1) * runs_on_card()

    def __str__(self) -> str:
        # Lightning's own text goes through the loaders, which have chunks only during a run.
        data = type(self.datamodule).__name__
        count = self.participation.clients_per_round
        return f"{type(self).__name__}({data}, clients_per_round={count})"

    def describe(self) -> str:
        """Returns the protocol in words: that of the data, and who trains in a round."""
        who = self.participation.describe()
        stages = ", ".join(stage.describe() for stage in self.stages)
        if stages:
            stages = f" Messages: {stages}."
        return f"{self.datamodule.describe()} Training: {who}; seed {self.seed}.{stages}"

    # ---- who trains ---------------------------------------------------------------------------

    def cohort(self, round_index: int) -> np.ndarray:
        """Returns the ids of the clients that train in a round, int64, ascending.

        The cohort is a function of (seed, round).
        """
        return self.participation.cohort(round_index)

    def chunks(
        self, ids: np.ndarray, split: str, count: int, owned: bool, work: np.ndarray | float = 1.0
    ) -> list[np.ndarray]:
        """Returns this process's share of some clients in chunks, largest clients first.

        Args:
            ids: The clients.
            split: The split whose samples are used.
            count: Number of chunks; superfluous chunks are empty and come last.
            owned: True: a client belongs to the process id % world_size, which has the rows of its
                states. False: clients are assigned by cost, so that processes finish together.
            work: A factor on the cost of each client, [C] or a number for all.
        """
        rank, world = self.place()
        sizes = self._split_sizes(split)[ids]
        order = np.argsort(-sizes, kind="stable")
        mine = ids[order]
        if owned:
            mine = mine[mine % world == rank]
        elif world > 1:
            limit = max(count * self.chunk_size, -(-len(ids) // world))
            costs = (self.cost(sizes) * work)[order]
            mine = mine[assign_clients(costs, world, limit) == rank]
        needed = min(count, max(1, -(-len(mine) // self.chunk_size)))
        return np.array_split(mine, needed) + [mine[:0]] * (count - needed)

    def _split_sizes(self, split: str) -> np.ndarray:
        return getattr(self.datamodule.partition, split).sizes

    def place(self) -> tuple[int, int]:
        """Returns the number of this process, and how many processes there are."""
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size

    def round(self, round_index: int, device: torch.device) -> Cohort:
        """Returns the clients of a round (from 0), as this process trains them."""
        who = self.participation
        ids = self.cohort(round_index)
        work = who.work(round_index, ids)
        _, world = self.place()
        share = -(-len(ids) // world)
        if self.stateful:  # one process may own all clients of the cohort
            share = len(ids)
        count = max(1, -(-share // self.chunk_size))
        chunks = self.chunks(ids, "train", count, owned=self.stateful, work=work)
        seconds = None
        if who.clock is not None and not self._pooled:
            seconds = who.end(round_index)
        data = self.client_data(device)
        return Cohort(round_index, ids, chunks, data, seconds, bool(who.dropout))

    # ---- loaders ------------------------------------------------------------------------------

    def train_dataloader(self) -> CohortLoader:
        return CohortLoader(self)

    def val_dataloader(self) -> ChunkLoader | list[Any]:
        """Returns chunks of all clients, for every evaluated split that has samples."""
        splits = [s for s in self.evaluate if self._split_sizes(s).any()]
        return ChunkLoader(self, splits) if splits else []

    def test_dataloader(self) -> ChunkLoader:
        if not self._split_sizes("test").any():
            raise ConfigError("data.protocol: no client has a test sample; give it a test share")
        return ChunkLoader(self, ["test"])

    predict_dataloader = test_dataloader

    def transfer_batch_to_device(self, batch: Any, device: torch.device, _: int) -> Any:
        return batch  # it reads its samples on the device


class CohortLoader:
    """An iterable over one batch, which is the cohort of the Trainer's current round."""

    def __init__(self, loop: FederatedLoop) -> None:
        self.loop = loop

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Cohort]:
        # A generator, since after a resume Lightning calls iter() before it has set the round.
        trainer = self.loop.trainer
        assert trainer is not None
        yield self.loop.round(trainer.current_epoch, trainer.strategy.root_device)


class ChunkLoader:
    """An iterable over all clients in chunks, for an evaluation, as long in every process."""

    def __init__(self, loop: FederatedLoop, splits: Sequence[str]) -> None:
        self.loop = loop
        self.splits = splits

    def __len__(self) -> int:
        return len(self.splits) * self._chunks_per_split()

    def _chunks_per_split(self) -> int:
        _, world = self.loop.place()
        share = -(-self.loop.num_clients // world)
        return max(1, -(-share // self.loop.chunk_size))

    def __iter__(self) -> Iterator[Clients]:
        loop = self.loop
        count = self._chunks_per_split()
        trainer = loop.trainer
        assert trainer is not None
        data = loop.client_data(trainer.strategy.root_device)
        for split in self.splits:
            chunks = loop.chunks(np.arange(loop.num_clients), split, count, owned=True)
            for number, ids in enumerate(chunks):
                if loop._store is not None and number + 1 < count:
                    loop._store.prefetch(chunks[number + 1])
                yield Clients(ids, trainer.current_epoch, data, split)


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
