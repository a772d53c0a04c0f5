"""An engine for authors of methods: slow, and exact about what went wrong where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfl.engines.base import Engine
from pfl.engines.batch import Batch
from pfl.engines.sequential import SequentialEngine


class DebugError(RuntimeError):
    """An error with the client, round, epoch and step in which it arose."""


class DebugEngine(SequentialEngine):
    """Trains one client at a time in one thread, with plain autograd and many checks.

    - An error in `client_update` names the client and the round, and the epoch and local step
      whose gradient was taken last.
    - The first value that is not finite is reported where it arises: in the model before a
      gradient, in a layer's output, in the loss, or in the gradient of a parameter.
    - In the first round some clients train together and alone, with the same result.
    - A client's code that reads what only the server has is refused (`pfl.method.checked`).
    - Changes in place that would leak to other clients are errors: of the received model, the
      global model, the server's states, or the clients' ids.
    """

    name = "debug"
    max_threads = 1
    strict = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._place = ""  # client, round, epoch and step of the last gradient

    take_step = Engine.take_step  # the gradient is one vector: nothing is fused

    def descend(self, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, list[int]]:
        losses = super().descend(v, *args, **kwargs)
        self._require_finite(v, "the models after the local steps are")
        return losses

    def group_size(self, clients: int, threads: int) -> int:
        return 1

    @contextmanager
    def guard(self, clients: Any, shared: Callable[[], Mapping[str, Tensor]]) -> Iterator[None]:
        ids = np.array(clients.ids)
        before = {name: values.clone() for name, values in shared().items()}
        named = "no client"
        if len(ids):
            named = f"client {', '.join(map(str, ids.tolist()))}"
        self._place = f"{named} in round {clients.round + 1}"
        try:
            yield
        except DebugError:
            raise
        except Exception as error:
            raise DebugError(f"{self._place}: {type(error).__name__}: {error}") from error
        changed = []
        if not np.array_equal(ids, clients.ids):
            changed.append("`clients.ids`")
        for name, values in shared().items():
            if not torch.equal(values.nan_to_num(), before[name].nan_to_num()):
                changed.append(f"`{name}`")
        if changed:
            raise DebugError(
                f"{self._place}: {', '.join(changed)} changed in place, but other clients use the "
                f"same values; work on a copy, such as w.clone()"
            )

    def run_client(
        self, c: int, w: Tensor, batch: Batch, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        self._place = batch.origin.describe(c)
        self._require_finite(w, "the model at which the gradient is taken is")
        self._require_finite(batch.inputs[c], "the samples are")
        network, _ = self.runner.replica(training=True)
        leaves = [(n, m) for n, m in network.named_modules() if not any(m.children())]

        def check_output(name: str, module: nn.Module, _: Any, output: Any) -> None:
            layer = type(module).__name__
            if name:
                layer = f"{name} ({layer})"
            self._require_finite(output, f"the output of layer {layer} is")

        hooks = [m.register_forward_hook(partial(check_output, n)) for n, m in leaves]
        try:
            with torch.autograd.set_detect_anomaly(True):
                loss, parameters, pieces = super().run_client(c, w, batch, *args, **kwargs)
        except DebugError:
            raise
        except Exception as error:
            raise DebugError(f"{self._place}: {type(error).__name__}: {error}") from error
        finally:
            for hook in hooks:
                hook.remove()
        self._require_finite(loss, "the loss is")
        for layer, piece in zip(self.runner.space.layers, pieces, strict=True):
            self._require_finite(piece, f"the gradient of {layer.name} is")
        return loss, parameters, pieces

    def _require_finite(self, values: Any, what: str) -> None:
        if isinstance(values, Tensor) and not values.isfinite().all():
            raise DebugError(f"{self._place}: {what} not finite")
