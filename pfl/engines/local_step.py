"""The clients' local steps on the rows of a [C, P] matrix: plain steps, and optimizers' steps."""

# Without annotations from __future__: TorchScript reads the annotations of named tuples.
import inspect
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from pfl.engines.batch import some_rows
from pfl.errors import ConfigError, require
from pfl.parameters import replace_values_in, values_in
from pfl.proximal import soft_threshold
from pfl.torchscript import scripted

OptimizerFactory = Callable[[Iterable], Optimizer]
"""Makes an optimizer of some parameters; configured in YAML by class path and arguments."""

_NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")


class Rule(NamedTuple):
    """What an optimizer remembers of each of C clients, and how it makes a direction of it.

    With d = g + pull v - drift in the place of a gradient g, and t = 1, 2, ... the client's steps:

        first <- beta first + gain d
        second <- beta_2 second + (1 - beta_2) d^2

    Momentum's direction is `first`, or d + beta first for Nesterov's. Adam's direction is
    (first / (1 - beta^t)) / (sqrt(second / (1 - beta_2^t)) + eps). All values are those of
    `torch.optim`, to rounding; `step_of` reads them.

    Attributes:
        beta, gain, nesterov: Of `first`. In a client's first step of momentum, the gain is 1.
        beta_2, eps: Of Adam.
        pull: Weight decay, and the weight of a proximal term.
        drift: [C, P]; None for zero.
        gradient: Where engines put g, [C, P].
        first: [C, P], at first zero.
        second: [C, P], at first zero; None for momentum.
        taken: t - 1, float64 [C, 1].
    """

    beta: float
    gain: float
    nesterov: bool
    beta_2: float
    eps: float
    pull: float
    drift: Tensor | None
    gradient: Tensor
    first: Tensor
    second: Tensor | None
    taken: Tensor

    def rows(self, rows: slice) -> "Rule":
        """Returns the same rule for some of the clients; what it remembers is shared."""
        return self._replace(
            drift=some_rows(self.drift, rows),
            gradient=self.gradient[rows],
            first=self.first[rows],
            second=some_rows(self.second, rows),
            taken=self.taken[rows],
        )


def follow_adam(rule: Rule, v: Tensor, second: Tensor, lr: float) -> None:
    """Computes v <- v - lr direction of Adam, for all devices."""
    d = rule.gradient
    rule.first.lerp_(d, rule.gain)
    second.mul_(rule.beta_2).addcmul_(d, d, value=1 - rule.beta_2)
    rest = 1 - torch.pow(rule.beta, rule.taken)
    root = (1 - torch.pow(rule.beta_2, rule.taken)).sqrt()
    divisor = second.sqrt().mul_((rest / root).to(v.dtype)).add_((rule.eps * rest).to(v.dtype))
    v.addcdiv_(rule.first, divisor, value=-lr)


def _no_tensors() -> list[Tensor]:
    none: list[Tensor] = []
    return none


@scripted
def follow(rule: Rule, v: Tensor, lr: float, shrink: float) -> None:
    """Computes v <- shrink v - lr direction, after the gradient was put into the rule."""
    d = rule.gradient
    drift = rule.drift
    second = rule.second
    if rule.pull != 0.0:
        d.add_(v, alpha=rule.pull)
    if drift is not None:
        d.sub_(drift)
    if shrink != 1.0:
        v.mul_(shrink)
    rule.taken.add_(1)
    if second is not None and v.device.type == "cpu":
        # The kernel of torch.optim, twice as fast. Lists of rows that are made one by one would
        # hide from TorchScript that it changes them.
        torch._fused_adam_(
            v.unbind(0),
            d.unbind(0),
            rule.first.unbind(0),
            second.unbind(0),
            _no_tensors(),
            rule.taken.to(torch.float32).unbind(0),
            lr=lr,
            beta1=rule.beta,
            beta2=rule.beta_2,
            weight_decay=0.0,
            eps=rule.eps,
            amsgrad=False,
            maximize=False,
        )
        return
    if second is not None:
        follow_adam(rule, v, second, lr)
        return
    if rule.gain == 1.0:
        torch.add(d, rule.first, alpha=rule.beta, out=rule.first)
    else:
        rule.first.mul_(rule.beta)
        gain = torch.full_like(rule.taken, rule.gain).masked_fill_(rule.taken == 1, 1)
        rule.first.addcmul_(d, gain.to(d.dtype))
    if rule.nesterov:
        v.sub_(d, alpha=lr).sub_(rule.first, alpha=lr * rule.beta)
    else:
        v.sub_(rule.first, alpha=lr)


class Step(NamedTuple):
    """A plain step of v [C, P]: v <- soft(shrink v - lr (g + decay u) + shift, threshold).

    g is the gradient at u = scale v + offset, or the direction that a rule makes of it.

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
        rule: An optimizer's; None for plain gradients.
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
    rule: Rule | None = None

    def rows(self, rows: slice) -> "Step":
        """Returns the same step for some rows of v."""
        terms = (self.shift, self.offset, self.scale, self.mask)
        shift, offset, scale, mask = (some_rows(term, rows) for term in terms)
        own = self._replace(shift=shift, offset=offset, scale=scale, mask=mask)
        if self.rule is not None:
            own = own._replace(rule=self.rule.rows(rows))
        return own

    def toward(self, v: Tensor) -> tuple[Tensor, "Step"]:
        """Returns what backward passes change, and the step that they take of it.

        They change v itself, or, for `apply_after_gradient`, the gradient of the rule.
        """
        if self.rule is None:
            return v, self
        return self.rule.gradient, TAKE_GRADIENT

    def gradient_point(self, v: Tensor) -> Tensor:
        """Returns u, the point at which the gradient is taken: v itself without an offset."""
        if self.offset is None:
            return v
        if self.scale is None:
            return self.offset + v
        return self.offset + self.scale * v

    def apply_after_gradient(self, v: Tensor, u: Tensor) -> None:
        """Applies decay, shift, threshold and mask to v, after the gradient was subtracted.

        A rule is applied first: the gradient was put into it instead.
        """
        if self.part is not None:
            rest = self._replace(part=None)
            terms = (rest.shift, rest.mask, rest.rule)
            if rest.decay > 0 or rest.threshold or any(term is not None for term in terms):
                moved = v.clone()
                rest.apply_after_gradient(moved, u)
                torch.where(self.part, moved, v, out=v)
            return
        if self.rule is not None:
            follow(self.rule, v, self.lr, self.shrink)
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


def step_of(
    optimizer: Optimizer | None,
    v: Tensor,
    lr: float,
    pull: float = 0.0,
    drift: Tensor | float = 0.0,
) -> Step | None:
    """Returns the step of v [C, P] of an optimizer that gets g + pull v - drift as the gradient.

    Args:
        optimizer: None for plain gradient descent. Its rate is not used.
        v: The first v.
        lr: The learning rate.
        pull: The weight of v.
        drift: [P] or [C, P]; a number is zero.

    Returns:
        None for an optimizer that is not exactly SGD, Adam or AdamW, or that has other options
        than momentum, dampening, nesterov, betas, eps and weight_decay.
    """
    if optimizer is None:
        shift = None
        if isinstance(drift, Tensor):
            shift = (lr * drift).expand_as(v)
        return Step(lr, 1 - lr * pull, shift)
    hooks = any(value for name, value in vars(optimizer).items() if name.endswith("_hooks"))
    if type(optimizer) not in (SGD, Adam, AdamW) or hooks or len(optimizer.param_groups) > 1:
        return None
    group = optimizer.param_groups[0]
    if any(group.get(name) for name in ("amsgrad", "maximize", "differentiable")):
        return None
    is_sgd = type(optimizer) is SGD
    beta = 0.0
    beta_2 = 0.0
    if is_sgd:
        beta = group["momentum"]
    else:
        beta, beta_2 = group["betas"]
    gain = 1 - group.get("dampening", beta)
    eps = group.get("eps", 0.0)
    decay = group["weight_decay"]
    if any(isinstance(number, Tensor) for number in (beta, beta_2, gain, eps, decay)):
        return None
    shrink = 1.0
    if type(optimizer) is AdamW or group.get("decoupled_weight_decay"):
        shrink = 1 - lr * decay
    else:
        pull += decay
    if is_sgd and beta == 0:
        return step_of(None, v, lr, pull, drift)
    second = None
    if not is_sgd:
        second = torch.zeros_like(v)
    rows = None
    if isinstance(drift, Tensor):
        rows = drift.expand_as(v)
    rule = Rule(
        beta=float(beta),
        gain=float(gain),
        nesterov=bool(group.get("nesterov")),
        beta_2=float(beta_2),
        eps=float(eps),
        pull=pull,
        drift=rows,
        gradient=torch.zeros_like(v),
        first=torch.zeros_like(v),
        second=second,
        taken=torch.zeros(len(v), 1, dtype=torch.float64, device=v.device),
    )
    return Step(lr, shrink, rule=rule)


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
        self.weight_decay = weight_decay
        self.part = part
        self._moving = w
        if part is not None and factory is not None:
            self._moving = values_in(part, w)
        self._optimizer: Optimizer | None = None
        if factory is not None:
            self._parameter = torch.nn.Parameter(self._moving)  # shares its memory
            self._optimizer = check_elementwise(factory([self._parameter]))
        self.set_rate(lr)

    def set_rate(self, lr: float) -> None:
        """Takes the steps to come with another learning rate."""
        self.lr = lr
        if self._optimizer is not None:
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


def clipped(g: Tensor, limit: float, part: Tensor | None = None) -> Tensor:
    """Returns gradients [C, P], each of which is scaled to a norm of at most `limit`.

    With a `part`, bool [P], only its values count, since the others do not move.

    Example:
        >>> clipped(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    moving = g
    if part is not None:
        moving = torch.where(part, g, 0.0)
    norms = moving.norm(dim=1, keepdim=True)
    return g * (limit / norms.clamp_min(limit))


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


def check_local_step(factory: OptimizerFactory, lr: float) -> None:
    """Refuses an optimizer that cannot take local steps, or has a rate of its own beside `lr`.

    Raises:
        ConfigError: It cannot be made, mixes the values of a tensor, or has another rate.
    """
    try:
        made = factory([torch.nn.Parameter(torch.zeros(1, 1))])
    except (TypeError, ValueError) as error:  # such as a negative momentum
        raise ConfigError(f"model.optimizer: {error}") from error
    check_elementwise(made)
    own = inspect.signature(type(made)).parameters.get("lr")
    rate = made.param_groups[0].get("lr", lr)
    if own is not None and rate not in (own.default, lr):
        raise ConfigError(f"model.optimizer.lr: {rate}; the local rate is model.lr, {lr}")


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
