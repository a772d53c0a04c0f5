"""The score of forecasts of a series."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from pfl.datamodules.errors import check_whole


class MASE(Metric):
    """The mean absolute scaled error of a client's forecasts (Hyndman and Koehler, 2006).

    The mean of |y - forecast| over the client's test samples, divided by the mean of
    |y_t - y_{t-m}| over its training samples: the error, where the model was trained, of the
    forecast that repeats the value of m steps ago. Below 1 the model is better than that. It is the
    same for all units of measurement, so that a mean over clients has a meaning.

    The training samples must be in the order of time, as the windows of a table are that is sorted
    by time. NaN for a client with at most m training samples, or a constant series.

    Args:
        season: m: 1 for the last value, 24 for the value of the day before of hourly ones.

    Shape: forecasts and values float [n] or [n, H].

    Example:
        >>> metric = MASE()
        >>> metric.begin_client(torch.tensor([1.0, 3.0, 2.0]))  # the scale: (2 + 1) / 2
        >>> metric.update(torch.tensor([5.0, 5.0]), torch.tensor([2.0, 5.0]))
        >>> float(metric.compute())  # (3 + 0) / 2 / 1.5
        1.0
    """

    higher_is_better = False
    is_differentiable = True
    full_state_update = False
    reads_series = True  # `begin_client` gets a client's training targets
    error: Tensor
    number: Tensor

    def __init__(self, season: int = 1) -> None:
        super().__init__()
        self.season = check_whole("MASE.season", season)
        self.scale = torch.tensor(torch.nan, dtype=torch.float64)
        self.add_state("error", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("number", torch.tensor(0), dist_reduce_fx="sum")

    def begin_client(self, series: Tensor) -> None:
        """Takes the scale from a client's training targets [n] or [n, H], in order of time."""
        moves = series[self.season :].double() - series[: -self.season].double()
        self.scale = moves.abs().mean()  # NaN without moves

    def update(self, predicted: Tensor, targets: Tensor) -> None:
        """Adds forecasts; a ValueError if the targets are no values."""
        if not targets.is_floating_point():
            raise ValueError("the targets must be values, as in a regression")
        self.error += (predicted.double() - targets.double()).abs().sum()
        self.number += targets.numel()

    def compute(self) -> Tensor:
        """Returns the error in units of the scale; NaN where the scale is 0 or not known."""
        if not self.scale > 0:
            return torch.full_like(self.scale, torch.nan)
        return self.error / self.number / self.scale
