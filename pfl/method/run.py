"""A federated method in a run: facts about the run, evaluation, checkpoints and logging."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.communication import Ledger
from pfl.distributed.collectives import gather, sum_over_processes
from pfl.errors import ConfigError
from pfl.method.checkpoint import check, restore, save
from pfl.method.module import FederatedModule
from pfl.method.scoring import Evaluation, predictions


class FederatedRun(FederatedModule):
    """A method during a run: facts that the method may use, evaluation, checkpoints and logging.

    Attributes:
        row: The last round's row of metrics.
        recorded: The last round's rows of each table, as arrays by column.
        evaluation: The scores of the last complete evaluation; None before the first.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.row: dict[str, float] = {}
        self.recorded: dict[str, dict[str, np.ndarray]] = {}
        self.evaluation: Evaluation | None = None
        self._pass: Evaluation | None = None
        self._rounds_apart = 1  # from one scheduled evaluation to the next
        self._set_up = False
        self._loaded: dict[str, Any] | None = None

    # ---- hooks that a method may write --------------------------------------------------------

    def check_setup(self) -> None:
        """Checks that the run fits the method, once before anything runs; here nothing.

        The facts below are known here, and the network has been inspected. Raise a `ConfigError`
        for what does not fit, or call `require_all_clients`, `require_validation` or
        `require_exact_states`.
        """

    def begin_evaluation(self) -> None:
        """Computes what the server needs before an evaluation; here nothing.

        Every process calls it, so that sums over processes are possible here.
        """

    def after_evaluation(self, row: dict[str, float]) -> None:
        """Acts on the scores of a scheduled evaluation during `fit`; here nothing.

        Args:
            row: The evaluation's numbers, such as `row["val/personalized/loss"]`, the same on every
                process.
        """

    # ---- facts about the run ------------------------------------------------------------------

    @property
    def num_clients(self) -> int:
        """M, the number of clients that train: all but those of `loop.unseen`."""
        return len(self.population)

    @property
    def population(self) -> np.ndarray:
        """The ids of the M clients that train, in some rounds or in all, ascending int64 [M]."""
        return self._loop.population

    @property
    def unseen_clients(self) -> np.ndarray:
        """The ids of the clients that never train (`loop.unseen`), ascending int64."""
        return self._loop.unseen_clients

    @property
    def client_sizes(self) -> np.ndarray:
        """Number of training samples of every client by id, int64; `[self.population]` is [M]."""
        return self._loop.datamodule.client_sizes

    @property
    def seed(self) -> int:
        """The seed of the run's cohorts and sample orders, for `generator(self.seed, ...)`."""
        return self._loop.seed

    @property
    def max_rounds(self) -> int | None:
        """The number of rounds after which the run ends; None if that is not known beforehand."""
        rounds = self.trainer.max_epochs
        return None if rounds is None or rounds < 0 else rounds

    def cohort(self, round_index: int) -> np.ndarray:
        """Returns the ids of the clients that train in a round (from 0), ascending int64."""
        return self._loop.cohort(round_index)

    @property
    def cohort_size(self) -> int:
        """The number of clients in a round; with Bernoulli sampling the expected one."""
        return self._loop.cohort_size

    def problem_constant(self, name: str) -> float | None:
        """Returns a constant of the clients' objectives, such as `smoothness`.

        None if the data module does not have the constant.
        """
        return getattr(self._loop.datamodule, name, None)

    def require_all_clients(self) -> None:
        """Refuses a run in which a round trains some of the clients only; for `check_setup`."""
        self._loop.require_all_clients(type(self).__name__)

    def require_validation(self, reason: str) -> None:
        """Refuses a run that does not measure a validation loss; for `check_setup`.

        Args:
            reason: The argument and value that need the loss, as "penalty_schedule: plateau".
        """
        loop = self._loop
        if not (loop.datamodule.partition.val.sizes.any() and "val" in loop.evaluate):
            raise ConfigError(
                f"model.{reason} needs a validation loss; give data.protocol a validation share, "
                f"and loop.evaluate val"
            )
        if self.trainer.state.fn == "fit" and self.trainer.limit_val_batches == 0:
            raise ConfigError(
                f"trainer.limit_val_batches: 0; model.{reason} needs a validation loss, give 1.0"
            )

    def require_exact_states(self, reason: str) -> None:
        """Refuses a run whose client states are stored in 16 bits; for `check_setup`.

        Args:
            reason: The argument and value that need the states as they are.
        """
        dtype = self._loop.state_dtype
        if dtype is not None and dtype.itemsize < 4:
            raise ConfigError(
                f"loop.state_dtype: {str(dtype).removeprefix('torch.')}; model.{reason} adds up "
                f"small changes of a client state, which would drift; give float32 or null"
            )

    # ---- client states of all processes -------------------------------------------------------

    def iter_clients(self, split: Literal["train", "val", "test"] = "train") -> Iterator[Clients]:
        """Yields this process's share of the M clients in chunks, with their states.

        A number that is added up over the chunks must be added up over processes as well, with
        `sum_over_processes`.
        """
        loop, everyone = self._loop, self.population
        count = -(-len(everyone) // loop.chunk_size)
        for ids in loop.chunks(everyone, split, count, owned=True):
            clients = Clients(ids, self.rounds, loop.client_data(self.device), split)
            self.load_state(clients)
            yield clients

    def as_stored(self, name: str, values: Tensor) -> Tensor:
        """Returns rows of a client state as they will be read: rounded with `loop.state_dtype`."""
        return self.store.rounded(name, values)

    def client_rows(self, name: str, ids: np.ndarray) -> Tensor:
        """Returns the rows [n, width] of a client state for the clients `ids`, on every process.

        A client that never took part has the initial value. Every process must call it, with the
        same ids.
        """
        mine = ids % self.trainer.world_size == self.trainer.global_rank
        own = self.store.read(name, ids[mine], self.device)
        rows = own.new_zeros(len(ids), own.shape[1])
        rows[torch.from_numpy(mine)] = own
        return sum_over_processes(rows)

    def seen_clients(self, name: str) -> np.ndarray:
        """Returns the ids of the clients that have written a client state, ascending int64.

        Every process must call it.
        """
        seen = torch.zeros(self._loop.num_clients, device=self.device)
        seen[torch.from_numpy(self.store.seen(name))] = 1
        return np.flatnonzero(sum_over_processes(seen).cpu().numpy())

    def mean_state(self, name: str) -> Tensor:
        """Returns the mean [width] of a client state over all M clients.

        A client that never took part counts with the initial value. Every process must call it.
        """
        seen, chunk_size = self.store.seen(name), self._loop.chunk_size
        owned = int((self.population % self.trainer.world_size == self.trainer.global_rank).sum())
        total = (owned - len(seen)) * self.store.initial(name).to(self.device)
        for ids in np.split(seen, range(chunk_size, len(seen), chunk_size)):
            total += self.store.read(name, ids, self.device).sum(0)
        return sum_over_processes(total) / self.num_clients

    # ---- set-up and evaluation ----------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Sets the method up, and then lets the method check the run."""
        super().setup(stage)
        if stage == "fit":
            self._rounds_apart = self.trainer.check_val_every_n_epoch or 1
        self._set_up = True
        self.check_setup()

    def on_fit_start(self) -> None:
        """Allocates the clients' states, or takes them over from the checkpoint."""
        super().on_fit_start()
        if self._loaded is not None:
            restore(self, self._loaded, self.trainer.global_rank, self.trainer.world_size)
            self._loaded = None

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def on_validation_epoch_start(self) -> None:
        """Starts an evaluation pass; `evaluation` keeps the previous scores until it finishes."""
        loop = self._loop
        if self._pass is None or self._pass.loop is not loop or self._pass.device != self.device:
            self._pass = Evaluation(loop, self.device)
        self._pass.begin()
        self.begin_evaluation()

    def validation_step(self, clients: Clients, batch_idx: int = 0) -> None:
        """Computes the global and personalized scores of a chunk of clients."""
        assert self._pass is not None
        with self.in_full_precision():
            if self.store.slow and self.device.type == "cpu":  # the whole chunk was read ahead
                self.load_state(clients)
            self._pass.update(self, clients)

    def on_validation_epoch_end(self) -> None:
        """Logs the scores, once all clients have theirs."""
        assert self._pass is not None
        row = {"round": self.rounds, **self._pass.finish()}
        self.evaluation = self._pass
        self.row = {**self.row, **row}
        if self.trainer.state.fn != "fit" or self.trainer.sanity_checking:
            # `validate` and `test` return what Lightning's own log has.
            numbers = {name: float(value) for name, value in row.items()}
            self.log_dict(numbers, on_step=False, on_epoch=True, batch_size=1)
            return
        self._log_row(row)
        # The last round is evaluated in any case; a run that goes on from there must not differ
        # from a run that did not end.
        scheduled = not getattr(self.trainer, "finishing", False)
        if scheduled and (self.trainer.current_epoch + 1) % self._rounds_apart == 0:
            self.after_evaluation(row)

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, clients: Clients, batch_idx: int = 0) -> dict[str, np.ndarray]:
        """Returns the predictions of each kind of model for each client's test samples."""
        with self.in_full_precision():
            self.load_state(clients)
            return predictions(self, clients)

    # ---- checkpoints and logging --------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the clients' states and all counts to a checkpoint.

        Raises:
            ConfigError: A round has begun and is not over. A run that went on from the checkpoint
                would train some of the round's clients twice.
        """
        # Our own counters cannot tell a callback's `on_train_epoch_start` from its `on_train_end`:
        # in both, no chunk of the next round has been trained.
        progress = self.trainer.fit_loop.epoch_progress.current
        if progress.ready > progress.completed == self.trainer.global_step:  # a round is a step
            raise ConfigError(
                f"trainer.save_checkpoint: round {progress.ready} is not over, and no run could go "
                f"on from here; save once it is, as in on_train_epoch_end"
            )
        checkpoint["federated"] = save(self, self._partition_hash, self.client_bytes())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses a checkpoint of another run; states are restored once the device is known."""
        self._loaded = checkpoint.get("federated")
        if self._set_up:  # else `load_from_checkpoint`, which loads the model only
            # Lightning loads weights before 64-true converts the module: they would lose digits.
            self.trainer.precision_plugin.convert_module(self)
            check(self, checkpoint, self._partition_hash)

    @property
    def _partition_hash(self) -> str:
        return self._loop.datamodule.partition.hash

    def client_bytes(self) -> Ledger:
        """Returns every client's bytes over all processes. Every process must call it."""
        if self.trainer.world_size == 1:
            return self.ledger
        ledger = Ledger(self._loop.num_clients)
        ledger.load_state_dict(*gather(self.ledger.state_dict()))
        return ledger

    def _log_row(self, row: dict[str, float]) -> None:
        """Passes a round's numbers to callbacks and loggers, with all their digits.

        `self.log` would round the numbers to float32 and take milliseconds a round. The loggers'
        step is the round, from 0.
        """
        numbers = {name: float(value) for name, value in row.items()}
        tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}
        self.trainer.callback_metrics.update(tensors)
        self.trainer.logged_metrics.update(tensors)
        for logger in self.trainer.loggers:
            logger.log_metrics({**numbers, "epoch": self.trainer.current_epoch}, self.rounds - 1)
