"""Steps and optimizers of a few rows against torch.optim, row by row."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from pfl.engines.local_step import LocalOptimizer, Step, follow, step_of

W = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]], dtype=torch.float64)
PART = torch.tensor([True, False, True])
GRADIENTS = [torch.sin(W + k) for k in range(4)]


def alone(factory, row, part, count, decay=0.0):
    """A row after steps of the values in a part, with an optimizer of its own."""
    parameter = torch.nn.Parameter(W[row].clone())
    optimizer = factory([parameter], lr=0.1)
    for g in GRADIENTS[:count]:
        before = parameter.detach().clone()
        parameter.grad = g[row] + decay * before
        optimizer.step()
        with torch.no_grad():
            parameter.copy_(torch.where(part, parameter, W[row]))
    return parameter.detach()


@pytest.mark.parametrize("part", [None, PART], ids=["all", "part"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize(
    "factory",
    [None, SGD, partial(SGD, momentum=0.9), partial(AdamW, weight_decay=0.2), Adam],
    ids=["none", "SGD", "momentum", "AdamW", "Adam"],
)
def test_each_row_has_an_optimizer_of_its_own(factory, decay, part):
    """The second row takes two of four steps, and keeps its values afterwards."""
    w = W.clone()
    made = None
    if factory is not None:
        made = partial(factory, lr=7.0)  # which the method's takes the place of
    optimizer = LocalOptimizer(w, 0.1, decay, made, part)
    moving = torch.ones(3, dtype=torch.bool) if part is None else part
    for k, g in enumerate(GRADIENTS):
        optimizer.step(g.clone(), active=2 if k < 2 else 1)
    for row, count in ((0, 4), (1, 2)):
        expected = alone(factory or SGD, row, moving, count, decay)
        torch.testing.assert_close(w[row], expected, rtol=1e-12, atol=0)
        assert w[row][~moving].equal(W[row][~moving])


def test_others_may_change_the_values_between_two_steps():
    """The second step begins from what they have written, also where a part moves."""
    for part in (None, PART):
        w = W.clone()
        optimizer = LocalOptimizer(w, 0.1, factory=partial(SGD, lr=1.0), part=part)
        optimizer.step(torch.ones_like(w), active=2)
        w.copy_(10 * W)
        optimizer.step(torch.ones_like(w), active=2)
        moved = torch.ones(3) if part is None else part.double()
        torch.testing.assert_close(w, 10 * W - 0.1 * moved)


@pytest.mark.parametrize("pull", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("drift", [0.0, torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)])
@pytest.mark.parametrize(
    "factory",
    [
        partial(SGD, momentum=0.9),
        partial(SGD, momentum=1.0),
        partial(SGD, momentum=0.5, dampening=0.5, weight_decay=0.5),
        partial(SGD, momentum=0.9, nesterov=True),
        Adam,
        partial(AdamW, weight_decay=0.2),
    ],
)
def test_a_rule_takes_the_steps_of_torch_optim(factory, pull, drift):
    """Of g + pull v - drift, for two rows of which each has its own momentum."""
    v = W.clone()
    rate = 0.1
    step = step_of(factory([torch.nn.Parameter(W.clone())], lr=9.0), v, rate, pull, drift)
    parameter = torch.nn.Parameter(W.clone())
    optimizer = factory([parameter], lr=rate)
    for g in GRADIENTS:
        step.rule.gradient.copy_(g)
        follow(step.rule, v, step.lr, step.shrink)
        parameter.grad = g + pull * parameter.detach() - drift
        optimizer.step()
        torch.testing.assert_close(v, parameter.detach(), rtol=1e-6, atol=1e-9)


def test_sgd_without_momentum_is_a_plain_step():
    """v - η (g + (pull + decay) v - drift) as a factor on v and a shift."""
    drift = torch.ones(3, dtype=torch.float64)
    optimizer = SGD([torch.nn.Parameter(W.clone())], lr=9.0, weight_decay=0.5)
    step = step_of(optimizer, W, 0.1, 0.25, drift)
    assert step.rule is None
    assert (step.lr, step.shrink) == (0.1, 1 - 0.1 * 0.75)
    assert step.shift.tolist() == [[0.1] * 3] * 2
    assert step_of(None, W, 0.1) == Step(0.1, 1.0)


@pytest.mark.parametrize(
    "options", [{"maximize": True}, {"amsgrad": True}, {"differentiable": True}], ids=str
)
def test_options_that_no_rule_has_are_left_to_torch(options):
    assert step_of(Adam([torch.nn.Parameter(W.clone())], **options), W, 0.1) is None


def test_other_optimizers_are_left_to_torch():
    one, other = (torch.nn.Parameter(W.clone()) for _ in range(2))

    class Mine(SGD):
        pass

    assert step_of(torch.optim.RMSprop([one]), W, 0.1) is None
    assert step_of(Mine([one]), W, 0.1) is None
    assert step_of(SGD([{"params": [one]}, {"params": [other]}]), W, 0.1) is None
    hooked = SGD([one], momentum=0.5)
    hooked.register_step_pre_hook(lambda *_: None)
    assert step_of(hooked, W, 0.1) is None


def test_a_step_after_its_gradient_by_hand():
    """soft(v - η decay u + shift, 0.5) under a mask, of the values in a part alone."""
    u = torch.tensor([[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    shift = torch.full_like(W, 0.25)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    step = Step(0.1, shift=shift, threshold=0.5, decay=1.5, mask=mask)
    v = W - 0.1 * 1.5 * u + 0.25
    expected = v.sign() * (v.abs() - 0.5).clamp_min(0) * mask
    moved = W.clone()
    step.apply_after_gradient(moved, u)
    torch.testing.assert_close(moved, expected)
    moved = W.clone()
    step._replace(part=PART).apply_after_gradient(moved, u)
    torch.testing.assert_close(moved, torch.where(PART, expected, W))
    rows = step.rows(slice(1, 2))
    assert rows.shift.equal(shift[1:]) and rows.mask.equal(mask[1:]) and rows.offset is None
    for scale, point in ((None, W + shift), (2 * mask[:, :1], shift + 2 * W)):
        moved_to = Step(0.1, offset=shift, scale=scale).gradient_point(W)
        torch.testing.assert_close(moved_to, point)
    assert Step(0.1).gradient_point(W) is W
