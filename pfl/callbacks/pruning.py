"""Ends a trial of `pfl tune` early if its validation score lags behind those of other trials."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from pfl.errors import ConfigError
from pfl.method.algorithm import FederatedAlgorithm
from pfl.rounds.loop import FederatedLoop
from pfl.scores.names import candidates, scores_among, signed
from pfl.scores.runs import best_round, spent

if TYPE_CHECKING:
    from optuna import Study, Trial

PRUNED = "pruned_in_round"  # the attribute of a trial that was ended early


class Pruning(Callback):
    """Reports a run's validation score to Optuna in every evaluation, and stops the run if told.

    It also stops the run once a budget is spent, and does not report the round that exceeds it.

    `pfl tune` adds this callback to its trials. What the score is, and which score is better, is as
    in `pfl.scores.runs.best_round`; one whose small values are good is reported with a minus.
    Test scores are not read.

    Args:
        storage: The file of Optuna's journal.
        study: The name of the study.
        trial: The number of the trial.
        after: The number of rounds before which no run is stopped; None: no run is stopped.
        metric: The score, as in `best_round`, such as `val/global/accuracy`.
        budget: One of `pfl.scores.runs.BUDGETS` and its limit; None: no budget.

    Example:
        >>> callback = Pruning(storage="tune.journal", study="FedAvg", trial=0, after=10)
        >>> callback.after
        10
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

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reports the round's score.

        Raises:
            ConfigError: The clients have no validation samples.
        """
        assert isinstance(pl_module, FederatedAlgorithm)
        row, metrics = pl_module.row, _loop(trainer).metrics.higher_is_better
        row = {"round": pl_module.rounds, **row}
        if self.budget is not None and spent(row, self.budget[0]) > self.budget[1]:
            trainer.should_stop = True
            return
        best = best_round([row], self.metric, metrics)
        if best is None:
            if any(name.startswith("test/") for name in row):
                check_validated(row, self.metric)
            return
        stop = False
        if trainer.is_global_zero:
            stop = self._report(pl_module.rounds, score_of(best, metrics))
        if trainer.strategy.broadcast(stop):
            trainer.should_stop = True

    def _report(self, rounds: int, score: float) -> bool:
        """Returns whether the run is to be stopped."""
        study = open_study(self.storage, self.study, self.after)
        trial = trial_of(study, self.storage, self.number)
        if rounds not in study.get_trials(deepcopy=False)[self.number].intermediate_values:
            trial.report(score, rounds)  # else the run goes on from an earlier checkpoint
        if self.after is None or not trial.should_prune():
            return False
        trial.set_user_attr(PRUNED, rounds)
        return True


def _loop(trainer: pl.Trainer) -> FederatedLoop:
    return trainer.datamodule  # type: ignore[attr-defined]


def score_of(best: dict, metrics: Mapping[str, bool | None]) -> float:
    """Returns the score of a row of `best_round`, larger for better."""
    return signed(best["selected_by"], best[best["selected_by"]], metrics)


def check_validated(row: dict, metric: str | None) -> None:
    """Checks that a round with an evaluation has a validation score, though it may be NaN.

    Raises:
        ConfigError: The round has none.
    """
    have = [str(name) for name in scores_among(row, "val")]
    if metric is not None and not candidates(have, "val", metric):
        raise ConfigError(f"tune.metric: {metric}; it must be one of {', '.join(have)}")
    if not have:
        raise ConfigError(
            "data.init_args.protocol: the clients have no validation samples, by which `pfl tune` "
            "selects; give the protocol some, such as SplitOwn with validation: 0.1"
        )


def open_study(storage: str, name: str, after: int | None) -> Study:
    """Returns a study in Optuna's journal, which is created if need be; it maximizes.

    Args:
        storage: The file of the journal.
        name: The name of the study.
        after: The number of rounds before which no run is stopped; None: no run is stopped.

    Raises:
        ConfigError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "tune: it needs Optuna; install it with: pip install 'lightning-pfl[tune]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if after is not None:
        pruner = optuna.pruners.MedianPruner(n_warmup_steps=after)
    return optuna.create_study(
        storage=_journal(storage),
        study_name=name,
        pruner=pruner,
        direction="maximize",
        load_if_exists=True,
    )


def trial_of(study: Study, storage: str, number: int) -> Trial:
    """Returns the trial of a number, which may have begun in another process."""
    import optuna

    journal = _journal(storage)
    study_id = journal.get_study_id_from_name(study.study_name)
    trial_id = journal.get_trial_id_from_study_id_trial_number(study_id, number)
    return optuna.trial.Trial(study, trial_id)


def _journal(storage: str):  # type: ignore[no-untyped-def]
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    Path(storage).parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(storage))
