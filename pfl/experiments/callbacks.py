"""Callbacks of an experiment's runs: trials that end early, and checkpoints of the best round."""
# mypy: disable-error-code="override"

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from filelock import FileLock
from lightning.pytorch.callbacks import Callback

from pfl.datamodules.errors import ConfigError, optional_module
from pfl.method.algorithm import FederatedAlgorithm
from pfl.scores.names import candidates, scores_among, signed_score, wanted_score
from pfl.scores.runs import best_round, cost_of

NOT_VALIDATED = (
    "`pfl tune` selects by scores on validation data; give the protocol some, such as SplitOwn "
    "with validation: 0.1, and loop.evaluate the word val"
)

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.storages import JournalStorage

PRUNED = "pruned_in_round"  # the attribute of a trial that was ended early


class BestRound(Callback):
    """Saves `checkpoints/best.ckpt` in each round with the best score so far, as in `best_round`.

    `pfl compare --keep` adds this callback. A run without validation data has no such file: its
    last round counts.

    Args:
        metric: The score, as in `best_round`.
        budget: One of `pfl.scores.runs.BUDGETS` and its limit, after which no round counts.
    """

    def __init__(self, metric: str | None = None, budget: tuple[str, float] | None = None) -> None:
        self.metric = metric
        self.budget = budget
        self.best: float | None = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        row = {"round": pl_module.rounds, **pl_module.row}
        if self.budget is not None and cost_of(row, self.budget[0]) > self.budget[1]:
            return
        score = _score(trainer, pl_module, self.metric)
        if score is not None and (self.best is None or score > self.best):
            self.best = score
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "checkpoints" / "best.ckpt")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]


class Pruning(Callback):
    """Reports a run's validation score to Optuna in every evaluation, and stops the run if told.

    `pfl tune` adds this callback to its trials. What the score is, and which score is better, is as
    in `pfl.scores.runs.best_round`; one whose small values are good is reported with a minus. Test
    scores are not read. The round in which the budget is exceeded ends the run unreported.

    Args:
        storage: The file of Optuna's journal.
        study: The name of the study.
        trial: The number of the trial.
        after: The number of rounds before which no run is stopped; None: no run is stopped.
        metric: The score, as in `best_round`, such as `val/global/accuracy`.
        budget: One of `pfl.scores.runs.BUDGETS` and its limit; None: no budget.
    """

    def __init__(
        self,
        storage: str,
        study: str,
        trial: int,
        after: int | None = None,
        metric: str | None = None,
        budget: tuple[str, float] | None = None,
    ) -> None:
        self.storage = storage
        self.study = study
        self.number = trial
        self.after = after
        self.metric = metric
        self.budget = budget

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        row = {"round": pl_module.rounds, **pl_module.row}
        if self.budget is not None and cost_of(row, self.budget[0]) > self.budget[1]:
            trainer.should_stop = True
            return
        score = _score(trainer, pl_module, self.metric)
        if score is None:
            if any(name.startswith("test/") for name in row):
                loop: Any = trainer.datamodule  # type: ignore[attr-defined]
                check_validated(row, self.metric, loop.select_by)
            return
        stop = trainer.is_global_zero and self._report(pl_module.rounds, score)
        if trainer.strategy.broadcast(stop):
            trainer.should_stop = True

    def _report(self, rounds: int, score: float) -> bool:
        """Returns whether the run is to be stopped."""
        study, storage = open_study(self.storage, self.study, self.after)
        trial = trial_of(study, storage, self.number)
        if rounds not in study.get_trials(deepcopy=False)[self.number].intermediate_values:
            trial.report(score, rounds)  # else the run continues from an earlier checkpoint
        if self.after is None or not trial.should_prune():
            return False
        trial.set_user_attr(PRUNED, rounds)
        return True


def _score(trainer: pl.Trainer, algorithm: Any, metric: str | None) -> float | None:
    """Returns a round's validation score, larger for better; None if the round has none."""
    loop: Any = trainer.datamodule  # type: ignore[attr-defined]
    metrics = loop.metrics.higher_is_better
    wanted = wanted_score(metric, loop.select_by)
    best = best_round([{"round": algorithm.rounds, **algorithm.row}], wanted, metrics)
    if best is None:
        return None
    return signed_score(best["selected_by"], best[best["selected_by"]], metrics)


def check_validated(row: dict, metric: str | None, select_by: str | None) -> None:
    """Checks that a round with an evaluation has a validation score, though it may be NaN."""
    have = [str(name) for name in scores_among(row, "val")]
    wanted = wanted_score(metric, select_by)
    if wanted is not None and not candidates(have, "val", wanted):
        key = "tune.metric"
        if metric is None:
            key = "loop.select_by"
        raise ConfigError(f"{key}: {wanted}; it must be one of {', '.join(have)}")
    if not have:
        raise ConfigError(NOT_VALIDATED)


# ---- Optuna --------------------------------------------------------------------------------------


def import_optuna() -> Any:
    """Returns the package, whose log has warnings only."""
    optuna = optional_module("tune", "optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_study(path: str, name: str, after: int | None) -> tuple[Study, JournalStorage]:
    """Opens, or creates, an Optuna study that maximizes its objective, and its storage."""
    optuna = import_optuna()
    journal = Path(path)
    journal.parent.mkdir(parents=True, exist_ok=True)
    # Optuna's own lock is a file that outlives a killed process; the system releases this one.
    with FileLock(f"{path}.flock") as lock:
        if journal.is_file():
            content = journal.read_bytes()
        else:
            content = b""
        if not content.endswith(b"\n"):  # a killed process has left a part of a line
            with journal.open("ab") as file:
                file.truncate(content.rfind(b"\n") + 1)
    backend = optuna.storages.journal.JournalFileBackend(path, lock_obj=lock)
    storage = optuna.storages.JournalStorage(backend)
    pruners = optuna.pruners
    if after is None:
        pruner = pruners.NopPruner()
    else:
        pruner = pruners.MedianPruner(n_warmup_steps=after)
    study = optuna.create_study(
        storage=storage, study_name=name, pruner=pruner, direction="maximize", load_if_exists=True
    )
    return study, storage


def trial_of(study: Study, storage: JournalStorage, number: int) -> Trial:
    """Returns the trial of a number, which may have begun in another process."""
    from optuna.trial import Trial

    study_id = storage.get_study_id_from_name(study.study_name)
    return Trial(study, storage.get_trial_id_from_study_id_trial_number(study_id, number))
