"""Who takes part in a run: cohorts, clients that never train, drop-outs and stragglers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from torch import Tensor

from pfl.aggregation.accountant import Accountant, least_wait, most_uses
from pfl.aggregation.attacks import Attackers
from pfl.aggregation.privacy import Privacy, PrivateMean
from pfl.aggregation.robust import Rule
from pfl.clients import Clients, LocalSchedule
from pfl.datamodules import FederatedDataModule
from pfl.datamodules.errors import is_whole, require_value
from pfl.datamodules.randomness import generator
from pfl.errors import ConfigError
from pfl.files import read_value
from pfl.randomness import DrawKey, Seeded
from pfl.rounds.arrivals import Arrivals, Timetable
from pfl.rounds.client_lists import (
    BY_CLIENT,
    Affected,
    ByClient,
    Ids,
    KnownClients,
    Rounds,
    check_ids,
    check_rounds,
    is_list,
    read_by_client,
    read_rounds,
    read_unseen,
)
from pfl.rounds.clock import Clock

Sampling = Literal["uniform", "bernoulli", "weighted", "cyclic"]
DRAWN = ("uniform", "bernoulli", "weighted")  # anew in each round, by `loop.sampling`
WHOLE = LocalSchedule(batch_size=None)  # one local step, with all samples of a client
Cost: TypeAlias = Callable[[np.ndarray], np.ndarray]
"""The sample gradients of clients with numbers of samples, both [n]."""
Present: TypeAlias = Callable[[int, np.ndarray], np.ndarray]
"""Which of the clients that are drawn for a round are there, by (round, ids)."""


class Participation:
    """Who trains in a round, who fails and who is slow: functions of (seed, round, client).

    The docstring of `FederatedLoop` explains the arguments.

    Attributes:
        draws: Where the cohorts come from: the seed, or a secret key in a private run.
        trace: The given cohorts, by ids or names; None: they are drawn.
        unseen: A share of all clients, or ids or names of clients, that never train; None: nobody.
        dropout, stragglers: The clients that fail, and those that are slow.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> who = Participation(DigitsDataModule(num_clients=10), seed=0, unseen=[3, 8])
        >>> who.cohort(0).tolist()
        [0, 1, 2, 4, 5, 6, 7, 9]
    """

    def __init__(
        self,
        datamodule: FederatedDataModule,
        seed: int,
        clients_per_round: int | None = None,
        sampling: Sampling = "uniform",
        trace: str | Rounds | None = None,
        unseen: float | str | Sequence[int | str] | None = None,
        dropout: float | str | Rounds = 0.0,
        stragglers: float | str | Rounds = 0.0,
        straggler_work: float = 0.5,
        by_client: str | ByClient | None = None,
        privacy: Privacy | None = None,
        aggregation: Rule | None = None,
        attackers: Attackers | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock
        self._present: Present | None = None
        self.cost: Cost = np.asarray
        self._schedule = WHOLE
        self._ends: list[float] = []  # when each round ended, in virtual seconds
        self.timetable: Timetable | None = None
        self.privacy = privacy
        self.aggregation = aggregation
        self.attackers = attackers
        self.datamodule = datamodule
        self._known = KnownClients(datamodule)
        self.seed = seed
        self.draws: DrawKey = Seeded(seed)
        self.clients_per_round = clients_per_round
        self.sampling = sampling
        holds = clients_per_round is None or is_whole(clients_per_round)
        most = datamodule.num_clients
        expected = f"a whole number from 1 to {most} (data.num_clients), or null for everyone"
        require_value("loop.clients_per_round", clients_per_round, holds, expected)
        self.trace: Rounds | None = None if trace is None else read_rounds("trace", trace)
        self.unseen: float | Sequence[int | str] | None = read_unseen(unseen)
        self.dropout = Affected.read("dropout", dropout)
        self.stragglers = Affected.read("stragglers", stragglers)
        self.straggler_work = straggler_work
        self.by_client: ByClient | None = read_by_client(by_client)
        self._all_alike = not (self.dropout or self.stragglers or self.by_client)

    # ---- the population -----------------------------------------------------------------------

    @cached_property
    def unseen_clients(self) -> np.ndarray:
        """The ids of the clients that never train, ascending int64."""
        total = self.datamodule.num_clients
        if self.unseen is None:
            return np.empty(0, np.int64)
        if isinstance(self.unseen, float):
            count = max(1, int(self.unseen * total + 0.5))
            drawn = generator(self.seed, "unseen").choice(total, count, replace=False)
            return np.sort(drawn).astype(np.int64)
        return np.sort(np.asarray(self._unseen_ids, np.int64))

    @property
    def _unseen_ids(self) -> list[int]:
        """The list in `unseen` as ids, in its order; names become ids."""
        assert isinstance(self.unseen, Sequence)
        return self._known.ids_of(self.unseen, "loop.unseen")

    @cached_property
    def _cohorts(self) -> Ids:
        """The cohorts of `trace` by ids."""
        assert self.trace is not None
        return self._known.ids_by_round("trace", self.trace)

    @cached_property
    def _failing(self) -> Affected:
        """The clients of `dropout` by ids."""
        return self.dropout.by_ids(self._known)

    @cached_property
    def _slow(self) -> Affected:
        """The clients of `stragglers` by ids."""
        return self.stragglers.by_ids(self._known)

    @cached_property
    def population(self) -> np.ndarray:
        """The ids of the clients from which cohorts are drawn, ascending int64 [M]."""
        everyone = np.arange(self.datamodule.num_clients)
        return np.delete(everyone, self.unseen_clients) if len(self.unseen_clients) else everyone

    # ---- cohorts ------------------------------------------------------------------------------

    @property
    def cohort_size(self) -> int:
        """Number of clients in a round: the exact number, or the expected one (Bernoulli)."""
        if self.trace is not None:
            return max(map(len, self.trace), default=0)
        return self.at_once if self.timetable is None else self.timetable.buffer

    @property
    def at_once(self) -> int:
        """Number of clients that train at the same time."""
        return len(self.population) if self.clients_per_round is None else self.clients_per_round

    @property
    def _groups(self) -> int:
        """The number of groups that take turns with cyclic sampling."""
        return -(-len(self.population) // self.cohort_size)

    def limit_to(self, present: Present) -> None:
        """Has every cohort made of those of the drawn clients that are there."""
        self._present = present

    def cohort(self, round_index: int) -> np.ndarray:
        """Returns the ids of the clients that train in a round, ascending int64."""
        drawn = self._drawn(round_index)
        if self._present is None:
            return drawn
        return self._present(round_index, drawn)

    def _drawn(self, round_index: int) -> np.ndarray:
        """Returns the ids of the clients that are drawn for a round, ascending int64."""
        if self.trace is not None:
            return np.sort(np.asarray(self._cohorts[round_index], np.int64))
        if self.timetable is not None:
            return self.timetable.of(round_index).ids
        population = self.population
        size = self.cohort_size
        total = len(population)
        if size == total:
            return population.copy()
        if self.sampling == "cyclic":
            order = generator(self.seed, "cycle").permutation(population)
            groups = np.array_split(order, self._groups)
            return np.sort(groups[round_index % len(groups)])
        rng = self.draws.generator("cohort", round_index)
        if self.sampling == "bernoulli":
            chosen = rng.random(total) < size / total
            while self.privacy is None and not chosen.any():  # privacy counts on empty rounds
                chosen = rng.random(total) < size / total
            return population[chosen]
        weights = None
        if self.sampling == "weighted":
            sizes = self.datamodule.client_sizes[population]
            weights = sizes / sizes.sum()
        return population[np.sort(rng.choice(total, size, replace=False, p=weights))]

    # ---- failures -----------------------------------------------------------------------------

    def work(self, round_index: int, ids: np.ndarray) -> np.ndarray:
        """Returns the share of its local steps that each of these clients takes, float64 [C]."""
        slow = self._slow.mask(self.seed, round_index, ids)
        share = np.where(slow, self.straggler_work, 1.0)
        if self.by_client:
            share *= self._factors["work"][ids]
        return share

    def fails(self, round_index: int, ids: np.ndarray) -> np.ndarray:
        """Returns which of these clients fail after their training, bool [C]."""
        return self._failing.mask(self.seed, round_index, ids)

    def rates(self, ids: np.ndarray) -> np.ndarray:
        """Returns the factor on the learning rate of each of these clients, float64 [C]."""
        if not self.by_client:
            return np.ones(len(ids))
        return self._factors["rate"][ids]

    @cached_property
    def _factors(self) -> dict[str, np.ndarray]:
        """What `by_client` says of all clients, float64 by name; 1 where it says nothing."""
        total = self.datamodule.num_clients
        factors = {key: np.ones(total) for key in BY_CLIENT}
        for name, given in (self.by_client or {}).items():
            client = self._known.id_of(name, "loop.by_client")
            for what, value in given.items():
                factors[what][client] = value
        return factors

    def parts(self, clients: Clients) -> list[tuple[Clients, bool]]:
        """Splits a chunk of a cohort into clients that work equally much and fail alike.

        Returns:
            Each part, and whether the messages of its clients arrive. The first part may be empty.
        """
        if self._all_alike:
            return [(clients, True)]
        work = self.work(clients.round, clients.ids)
        rates = self.rates(clients.ids)
        fails = self.fails(clients.round, clients.ids)
        kinds = {(1.0, 1.0), *zip(work.tolist(), rates.tolist(), strict=True)}
        parts: list[tuple[Clients, bool]] = []
        for arrives in (True, False):
            for share, rate in sorted(kinds, reverse=True):
                rows = np.flatnonzero((work == share) & (rates == rate) & (fails != arrives))
                if len(rows) or not parts:
                    part = replace(clients.rows(rows), work=share, rate=rate)
                    parts.append((part, arrives))
        return parts

    # ---- virtual time -------------------------------------------------------------------------

    def pace(self, cost: Cost, schedule: LocalSchedule = WHOLE, buffer: int | None = None) -> None:
        """Sets what a round costs clients of some sizes, and how many messages end it.

        Args:
            cost: Returns the sample gradients of clients with numbers of samples, both [n].
            schedule: Their local steps, of which stragglers take a part.
            buffer: After how many messages a round ends; None: after all messages of the cohort.
        """
        self.cost = cost
        self._schedule = schedule
        self._ends = []
        self.timetable = None
        if buffer is not None and self.clock is not None and self.trace is None:
            ids = self.population
            gradients = np.asarray(cost(self.datamodule.client_sizes[ids]), np.float64)
            seconds = self.clock.seconds(ids, gradients, self.seed)
            self.timetable = Timetable(ids, seconds, self.at_once, buffer, self.seed)

    def arrivals(self, round_index: int) -> Arrivals | None:
        """Returns the messages that end a round by `loop.clock`; None: a whole cohort ends it."""
        return None if self.timetable is None else self.timetable.of(round_index)

    def check_buffer(self, buffer: int, method: str) -> None:
        """Refuses options without meaning where `buffer` messages end a round by `loop.clock`."""
        if self.clock is None or self.trace is not None:
            return
        total = len(self.population)
        if buffer > total:
            raise ConfigError(
                f"model.buffer_size: {buffer}; it must be at most {total}, the number of clients "
                f"that train"
            )
        if self.sampling != "uniform":
            raise ConfigError(
                f"loop.sampling: {self.sampling}; {method} draws one client after another, use "
                f"uniform"
            )
        if self.stragglers:
            raise ConfigError(
                f"loop.stragglers: clients of {method} are slow by loop.clock; leave it out"
            )
        if self.by_client and (self._factors["work"] != 1).any():
            raise ConfigError(
                f"loop.by_client: clients of {method} take all of their local steps, and "
                f"loop.clock says how long; leave work out"
            )

    def end(self, round_index: int) -> float:
        """Returns when a round ends, in virtual seconds since the first one began."""
        assert self.clock is not None
        if self.timetable is not None:
            return self.timetable.of(round_index).time
        for index in range(len(self._ends), round_index + 1):
            ids = self.cohort(index)
            sizes = self.datamodule.client_sizes[ids]
            whole = np.maximum(self._schedule.samples_of(sizes), 1)
            share = self._schedule.samples_of(sizes, self.work(index, ids)) / whole
            taken = self.clock.seconds(ids, self.cost(sizes) * share, self.seed)
            begun = self._ends[-1] if self._ends else 0.0
            self._ends.append(begun + float(taken.max(initial=0.0)))
        return self._ends[round_index]

    def ended(self, rounds: int) -> float | None:
        """Returns when the first `rounds` have ended, in virtual seconds; None without a clock."""
        if self.clock is None:
            return None
        if not rounds:
            return 0.0
        return self.end(rounds - 1)

    def go_on_from(self, rounds: int, seconds: float) -> None:
        """Lets the next round begin when the first `rounds` have ended, in virtual seconds.

        They may have had other settings, so that when each of them ended is not known. Not for
        messages as they come, whose times follow from all rounds.
        """
        if self.timetable is None:
            self._ends = [seconds] * rounds

    # ---- attackers ----------------------------------------------------------------------------

    @property
    def poisons(self) -> bool:
        """Whether there are attackers that train on other samples than they have."""
        return self.attackers is not None and self.attackers.attack.replaces("poison")

    def poison(self, inputs: Tensor, targets: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what attackers train on in place of some of their samples."""
        assert self.attackers is not None
        return self.attackers.attack.poison(inputs, targets, keys)

    @cached_property
    def _attacks(self) -> Any:
        """The ids of the attackers, an ascending int64 array, or a list of ids for each round."""
        if self.attackers is None:
            return np.empty(0, np.int64)
        given = self.attackers.clients
        if isinstance(given, float | int):
            expected = (
                "a share of the clients between 0 and 1, a list of ids or names, or one for each "
                "round"
            )
            require_value("loop.attackers.clients", given, 0 < given < 1, expected)
            count = max(1, int(given * len(self.population) + 0.5))
            drawn = generator(self.seed, "attackers").choice(self.population, count, replace=False)
            return np.sort(drawn).astype(np.int64)
        ids: Any = given
        if isinstance(given, str):
            ids = read_value("loop.attackers.clients", given)
        if is_list(ids) and len(ids) and all(map(is_list, ids)):
            return self._known.ids_by_round("attackers.clients", ids)
        if not is_list(ids) or not all(is_whole(one) or isinstance(one, str) for one in ids):
            raise ConfigError(
                f"loop.attackers.clients: {given} must hold a list of client ids or names, or one "
                f"for each round"
            )
        ids = self._known.ids_of(ids, "loop.attackers.clients")
        return np.sort(np.asarray(ids, np.int64))

    @cached_property
    def attacker_ids(self) -> np.ndarray:
        """The ids of the clients that attack in some round, ascending int64."""
        if isinstance(self._attacks, np.ndarray):
            return self._attacks
        return np.unique(np.concatenate([np.asarray(ids, np.int64) for ids in self._attacks]))

    def attacking(self, round_index: int, ids: np.ndarray) -> np.ndarray:
        """Returns which of some clients attack in a round, bool [C]."""
        attacks = self._attacks
        return np.isin(ids, attacks if isinstance(attacks, np.ndarray) else attacks[round_index])

    # ---- privacy ------------------------------------------------------------------------------

    def draw_from(self, draws: DrawKey) -> None:
        """Has the cohorts of a private run drawn from a key; those of any other have the seed."""
        if self.privacy is not None and not self.privacy.reproducible:
            self.draws = draws

    def private_mean(self, rounds: int | None) -> PrivateMean | None:
        """Returns what makes the means of a run private; None without `privacy`.

        Args:
            rounds: The number of rounds of the run; None if it is not known.
        """
        if self.privacy is None:
            return None
        total = len(self.population)
        privacy = self.privacy
        cyclic = self.trace is None and self.sampling == "cyclic"
        wait = 1
        if self.trace is not None:
            wait = least_wait(self._cohorts)
        elif cyclic:
            wait = self._groups
        if privacy.bands > wait:
            raise ConfigError(
                f"loop.privacy.bands: {privacy.bands}; a client takes part again after {wait} "
                f"rounds; give sampling: cyclic with at most {max(1, total // privacy.bands)} "
                f"clients_per_round, or fewer bands"
            )
        everyone = self.trace is not None or self.cohort_size == total
        accountant = Accountant(
            noise_multiplier=privacy.noise_multiplier or 0.0,
            delta=privacy.delta or total**-1.1,
            sampling=self.sampling if self.sampling in DRAWN and not everyone else "all",
            cohort=self.cohort_size,
            population=total,
            uses=None if self.trace is None else most_uses(self._cohorts),
            every=self._groups if cyclic else 1,
        )
        return PrivateMean(privacy, accountant, self.draws, rounds)

    # ---- checks and words ---------------------------------------------------------------------

    def check(self, rounds: int | None) -> None:
        """Checks the arguments against the data.

        Args:
            rounds: The number of rounds of the run, if it is known.

        Raises:
            ConfigError: A value is impossible for these data.
        """
        everyone = self.datamodule.num_clients
        if self.unseen is not None:
            self._check_unseen(everyone)
        total = len(self.population)
        of = "data.num_clients"
        if len(self.unseen_clients):
            of = "the clients that train"
        self.check_count(total, of)
        if self.trace is None and self.sampling == "weighted":
            able = int((self.datamodule.client_sizes[self.population] > 0).sum())
            if able < self.cohort_size:
                raise ConfigError(
                    f"loop.clients_per_round: {self.clients_per_round}; weighted sampling draws "
                    f"clients with samples, and only {able} have some"
                )
        for some in (self._failing, self._slow):
            some.check(everyone, rounds)
        if self.by_client:
            self.rates(self.population)  # knows all of the names
        if self.clock is not None:
            self.clock.check(everyone)
        if self.attackers is not None:
            self._check_attackers(everyone, rounds)
        if self.trace is not None:
            check_rounds("trace", self._cohorts, everyone, rounds)
            for number, cohort in enumerate(self._cohorts, 1):
                if len(both := np.intersect1d(cohort, self.unseen_clients)):
                    raise ConfigError(
                        f"loop.trace: round {number} has client {both[0]:.0f}, which loop.unseen "
                        f"keeps out of training; take it out of one of them"
                    )

    def check_count(self, most: int, of: str = "data.num_clients") -> None:
        """Refuses more clients a round than there are, or none.

        Args:
            most: The number of clients.
            of: What this is the number of, in words.
        """
        count = self.clients_per_round
        if count is not None and not 1 <= count <= most:
            raise ConfigError(
                f"loop.clients_per_round: {count}; it must be from 1 to {most} ({of}), or null "
                f"for everyone"
            )

    def _check_attackers(self, total: int, rounds: int | None) -> None:
        if isinstance(self._attacks, np.ndarray):
            check_ids("loop.attackers.clients", self._attacks.tolist(), total)
        else:
            check_rounds("attackers.clients", self._attacks, total, rounds)
        assert self.attackers is not None
        data = self.datamodule
        self.attackers.attack.check(data.num_classes, data.samples.input_shape)
        if not np.setdiff1d(self.population, self.attacker_ids).size:
            raise ConfigError("loop.attackers.clients: all clients attack; some must be honest")

    def _check_unseen(self, total: int) -> None:
        if isinstance(self.unseen, float):
            expected = f"a share that leaves some of the {total} clients to train"
        else:
            assert self.unseen is not None
            check_ids("loop.unseen", self._unseen_ids, total)
            expected = f"a part of the {total} clients, since some must train"
        require_value("loop.unseen", self.unseen, len(self.population) > 0, expected)

    def require_all_clients(self, method: str) -> None:
        """Raises a ConfigError if a round that is not empty may have some of the clients only."""
        total = len(self.population)
        key = "clients_per_round"
        sizes = [self.cohort_size]
        if self.trace is not None:
            key = "trace"
            sizes = [len(cohort) for cohort in self.trace]
        if some := [size for size in sizes if size not in (0, total)]:
            raise ConfigError(
                f"loop.{key}: {some[0]}; {method} needs all {total} clients in every round, use "
                f"null"
            )
        if self.dropout:
            rule = self.dropout.rule if isinstance(self.dropout.rule, float) else "a trace"
            raise ConfigError(
                f"loop.dropout: {rule}; {method} needs the messages of all {total} clients in "
                f"every round, use 0"
            )

    def describe(self) -> str:
        """Returns in words who trains."""
        if self.trace is not None:
            who = f"a replayed trace of {len(self.trace)} rounds"
        elif self.cohort_size == len(self.population):
            who = "all clients"
        else:
            who = f"{self.cohort_size} clients a round, {self.sampling} sampling"
        if self.timetable is not None:
            who = f"{self.at_once} clients at a time, a round for {self.cohort_size} messages"
        if unseen := len(self.unseen_clients):
            total = self.datamodule.num_clients
            who += f"; {unseen} of the {total} clients never train"
        if self.dropout:
            who += f"; {self.dropout.describe()} fails after its training"
        if self.stragglers:
            work = f"{self.straggler_work:g} of its local steps"
            who += f"; {self.stragglers.describe()} takes only {work}"
        if self.by_client:
            who += f"; {len(self.by_client)} clients have work or rates of their own"
        if self.attackers is not None:
            attack = type(self.attackers.attack).__name__
            who += f"; {len(self.attacker_ids)} clients attack ({attack}), and are not scored"
        if self.aggregation is not None:
            who += f"; {type(self.aggregation).__name__} in place of means"
        return who
