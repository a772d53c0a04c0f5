"""Early stopping of clients within a round, by their validation losses."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pfl.clients import Clients, LocalSchedule
from pfl.engines.batch import some_rows
from pfl.engines.oracle import Oracle


class EarlyStopping:
    """Finds, epoch by epoch, which clients of a local training go on, and their best models.

    A client's loss on its validation samples is taken after each of its epochs, and after its last
    step. It stops after `patience` epochs in a row whose loss is not below the smallest before. A
    client without validation samples never stops, and its last model counts.

    Args:
        oracle: Runs the models.
        clients: C clients that train.
        schedule: Their local steps.
        patience: The number of epochs.

    Attributes:
        moving: Which clients go on, bool [C].
    """

    def __init__(
        self, oracle: Oracle, clients: Clients, schedule: LocalSchedule, patience: int
    ) -> None:
        self._oracle = oracle
        self._clients = clients
        self._patience = patience
        self._per_epoch = np.maximum(schedule.steps_per_epoch(clients.sizes), 1)
        self._steps = clients.steps_of(schedule)
        self._least = np.full(len(clients), np.inf)
        self._waited = np.zeros(len(clients), np.int64)
        self.moving = self._steps > 0
        self._best: Tensor | None = None
        self._buffers: Tensor | None = None

    def after_step(self, step: int, v: Tensor, offset: Tensor | None = None) -> None:
        """Looks at the clients whose epoch has ended with a step (from 0).

        Args:
            step: The step.
            v: What moves, [C, P].
            offset: The part of the models that does not, [C, P]; None for zero.
        """
        buffers = self._clients.buffers
        if self._best is None:
            self._best = v.clone()
            self._buffers = None if buffers is None else buffers.clone()
        done = step + 1
        ended = (done % self._per_epoch == 0) | (done == self._steps)
        rows = np.flatnonzero(self.moving & ended & (done <= self._steps))
        if not len(rows):
            return
        at = v if offset is None else v + offset
        losses = self._losses(at, rows)
        better = np.isnan(losses) | (losses < self._least[rows])
        self._least[rows] = np.where(better, losses, self._least[rows])
        self._waited[rows] = np.where(better, 0, self._waited[rows] + 1)
        improved = torch.from_numpy(rows[better]).to(v.device)
        self._best[improved] = v[improved]
        if buffers is not None and self._buffers is not None:
            self._buffers[improved] = buffers[improved]
        self.moving[rows] = self._waited[rows] < self._patience

    def hold(self, v: Tensor) -> None:
        """Keeps the models v [C, P] of clients that have stopped where they were best.

        The steps of the others move them, too, and might take them to values that are not finite.
        """
        if self._best is None or self.moving.all():
            return
        still = torch.from_numpy(~self.moving).to(v.device)
        v[still] = self._best[still]

    def finish(self, v: Tensor) -> None:
        """Puts the clients' best models, and their running statistics, in place."""
        if self._best is None:
            return
        v.copy_(self._best)
        if self._clients.buffers is not None and self._buffers is not None:
            self._clients.buffers.copy_(self._buffers)

    def _losses(self, v: Tensor, rows: np.ndarray) -> np.ndarray:
        """Returns the mean validation losses of some rows' models; NaN without samples."""
        own = self._clients.rows(rows)
        w = v[torch.from_numpy(rows).to(v.device)]
        total = np.zeros(len(rows))
        for places, batch in own.validation_samples():
            buffers = some_rows(own.buffers, places)
            losses = self._oracle.evaluate(w[places], batch, buffers)[0]
            total[places.cpu().numpy()] += losses.sum(1).double().cpu().numpy()
        with np.errstate(invalid="ignore"):
            return total / own.data.sizes("val", own.ids)
