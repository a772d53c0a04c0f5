"""The clients' local steps on the rows of a [C, P] matrix: plain steps, and optimizers' steps."""

# Without annotations from __future__: TorchScript reads the annotations of named tuples.
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from pfl.engines.batch import some_rows
from pfl.errors import ConfigError, require
from pfl.parameters import replace_values_in, values_in
from pfl.proximal import soft_threshold

OptimizerFactory = Callable[[Iterable], Optimizer]
"""Makes an optimizer of some parameters; configured in YAML by class path and arguments."""

_NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")


class Step(NamedTuple):
    """A plain step of v [C, P]: v <- soft(shrink v - lr (g + decay u) + shift, threshold).

    g is the gradient at u = scale v + offset.

    Attributes:
        lr: Learning rate.
        shrink: Factor on v, such as 1 - lr * weight_decay.
        shift, offset: [C, P]; None for zero.
        threshold: The threshold of `pfl.proximal.soft_threshold`.
        scale: [C, 1], used only with an offset; None for one.
        decay: Weight decay at u, used only with an offset.
        part: The values that move, bool [P], whole parameters; None for all. The others keep their
            bits, whatever the other terms are.
        moving: Whether each parameter is in the part; `Oracle.descend` works it out.
        mask: A factor of 0 or 1 on every value after the step, [C, P]; None for none.
    """

    lr: float
    shrink: float = 1.0
    shift: Tensor | None = None
    offset: Tensor | None = None
    threshold: float = 0.0
    scale: Tensor | None = None
    decay: float = 0.0
    part: Tensor | None = None
    moving: list[bool] | None = None
    mask: Tensor | None = None

    def rows(self, rows: slice) -> "Step":
        """Returns the same step for some rows of v."""
        terms = (self.shift, self.offset, self.scale, self.mask)
        shift, offset, scale, mask = (some_rows(term, rows) for term in terms)
        return self._replace(shift=shift, offset=offset, scale=scale, mask=mask)

    def gradient_point(self, v: Tensor) -> Tensor:
        """Returns u, the point at which the gradient is taken: v itself without an offset."""
        if self.offset is None:
            return v
        if self.scale is None:
            return self.offset + v
        return self.offset + self.scale * v

    def apply_after_gradient(self, v: Tensor, u: Tensor) -> None:
        """Applies decay, shift, threshold and mask to v, after the gradient was subtracted."""
        if self.part is not None:
            rest = self._replace(part=None)
            if rest.decay > 0 or rest.threshold or not (rest.shift is rest.mask is None):
                moved = v.clone()
                rest.apply_after_gradient(moved, u)
                torch.where(self.part, moved, v, out=v)
            return
        if self.decay > 0:
            v.sub_(u, alpha=self.lr * self.decay)
        if self.shift is not None:
            v.add_(self.shift)
        if self.threshold > 0:
            v.copy_(soft_threshold(v, self.threshold))
        if self.mask is not None:
            v.mul_(self.mask)


TAKE_GRADIENT = Step(lr=-1.0, shrink=0.0)
"""The step v <- g."""


class LocalOptimizer:
    """Moves the models of C clients at once, each as if it had an optimizer of its own.

    An elementwise optimizer treats every value on its own, so one optimizer of a [C, P] matrix is
    C optimizers of its rows.

    Args:
        w: [C, P], changed in place.
        lr: Learning rate.
        weight_decay: Adds weight_decay * w to the gradient.
        factory: A `torch.optim` optimizer, whose learning rate is set to `lr`; None for plain SGD.
        part: The values that move, bool [P]; None for all. The others keep their bits.

    Raises:
        ConfigError: The optimizer mixes the entries of a tensor.

    Example:
        >>> w = torch.ones(2, 3)
        >>> LocalOptimizer(w, lr=0.5).step(torch.ones(2, 3), active=1)
        >>> w
        tensor([[0.5000, 0.5000, 0.5000],
                [1.0000, 1.0000, 1.0000]])
    """

    def __init__(
        self,
        w: Tensor,
        lr: float,
        weight_decay: float = 0.0,
        factory: OptimizerFactory | None = None,
        part: Tensor | None = None,
    ) -> None:
        self.w = w
        self.lr = lr
        self.weight_decay = weight_decay
        self.part = part
        self._moving = w
        if part is not None and factory is not None:
            self._moving = values_in(part, w)
        self._optimizer: Optimizer | None = None
        if factory is not None:
            self._parameter = torch.nn.Parameter(self._moving)  # shares its memory
            self._optimizer = check_elementwise(factory([self._parameter]))
            for group in self._optimizer.param_groups:
                group["lr"] = lr

    def step(self, g: Tensor, active: int) -> None:
        """Moves the first `active` rows along -g [C, P]; the other rows keep their values."""
        part = self.part
        w = self._moving
        if self._optimizer is not None and part is not None:
            w.copy_(values_in(part, self.w))  # others may have changed them
            g = values_in(part, g)
        if self.weight_decay:
            g = torch.add(g, w, alpha=self.weight_decay)
        if self._optimizer is None:
            if part is not None:
                g = torch.where(part, g, 0.0)
            w[:active].sub_(g[:active], alpha=self.lr)
            return
        # Momentum would also move the rows whose client has no data left.
        rest = w[active:].clone()
        self._parameter.grad = g
        with torch.enable_grad():  # some optimizers fail without autograd
            self._optimizer.step()
        w[active:] = rest
        if part is not None:
            replace_values_in(part, self.w[:active], w[:active])


def check_elementwise(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer; refuses one that mixes the entries of a tensor with a ConfigError."""
    name = type(optimizer).__name__
    if any(base.__name__ in _NOT_ELEMENTWISE for base in type(optimizer).__mro__):
        raise ConfigError(
            f"optimizer: {name} mixes the entries of a tensor, so clients would influence each "
            f"other; use an elementwise one such as SGD, Adam, AdamW, Adagrad or RMSprop"
        )
    _check_finite("optimizer", optimizer)
    return optimizer


def check_server_step(factory: OptimizerFactory) -> None:
    """Raises a ConfigError unless the optimizer takes a step from a gradient alone."""
    vector = torch.nn.Parameter(torch.zeros(2))
    vector.grad = torch.zeros(2)
    try:
        optimizer = factory([vector])
        optimizer.step()
    except Exception as error:  # the optimizer and its constructor may raise any type
        raise ConfigError(
            f"model.server_optimizer: {' '.join(str(error).split())}; the server has a vector and "
            f"its gradient, for one such as SGD, Adam or Adagrad"
        ) from error
    _check_finite("server_optimizer", optimizer)


def _check_finite(key: str, optimizer: Optimizer) -> None:
    for name, value in optimizer.defaults.items():
        require(f"{key}.{name}", value, True, "a number")
