"""Plain local steps: on every engine what their formula says, and with it local training."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad_and_value

from datamodules import DigitsDataModule, Sizes
from models import MLP, LeNet5, LogisticRegression, SmallCNN
from pfl.algorithms import FedProx
from pfl.engines import Engine
from pfl.engines.batch import Batch, StepBlock, default_loss
from pfl.engines.local_step import TAKE_GRADIENT, Step
from pfl.engines.oracle import Oracle
from pfl.parameters import ParameterSpace
from tests.problems import run

NETWORKS = {
    "logistic": lambda: LogisticRegression(256, 3),
    "MLP": lambda: MLP(256, (4,), 3),
    "LeNet5": lambda: LeNet5(num_classes=3, image_size=16),
    "no chain": lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 3), nn.Softplus()),
}
SOFT = nn.CrossEntropyLoss(label_smoothing=0.2)
STEPS = {
    "gradient": lambda rows: TAKE_GRADIENT,
    "descent": lambda rows: Step(0.1),
    "weight decay": lambda rows: Step(0.1, 0.7),
    "pull": lambda rows: Step(0.1, 0.7, shift=rows()),
    "elsewhere": lambda rows: Step(0.1, offset=rows()),
    "sparse": lambda rows: Step(0.1, threshold=0.02),
    "scaled": lambda rows: Step(0.1, offset=rows(), scale=rows()[:, :1]),
    "everything": lambda rows: Step(0.1, 0.9, rows(), rows(), 0.01, rows()[:, :1], 0.3),
    "masked": lambda rows: Step(0.1, mask=(rows() > 0).double()),
}
PARTS = {"last": slice(-2, None), "first": slice(2), "biases": slice(1, None, 2)}
TAKEN = [
    *((step, None) for step in STEPS),
    *((step, "last") for step in ("descent", "weight decay")),
    *((step, part) for step in ("everything", "masked") for part in PARTS),
]


class Functional(Engine):
    """An engine of a user: the gradient is all that it needs."""

    name = "functional"

    def gradient(self, w, batch, buffers=None, objective=None):
        def loss(model, c):
            n = batch.counts[c]
            parameters = self.runner.space.split(model)
            outputs = functional_call(self.runner.network, parameters, (batch.inputs[c, :n],))
            return self.runner.per_sample(outputs, batch.targets[c, :n]).mean()

        pairs = [grad_and_value(loss)(w[c], c) for c in range(batch.clients)]
        return torch.stack([loss for _, loss in pairs]), torch.stack([g for g, _ in pairs])


def soft(x, threshold):
    return x.sign() * (x.abs() - threshold).clamp_min(0)


@pytest.mark.parametrize(("step", "part"), TAKEN)
@pytest.mark.parametrize("loss", [default_loss, SOFT], ids=["cross entropy", "another"])
@pytest.mark.parametrize("network", NETWORKS)
def test_engines_take_the_step_of_the_formula(network, loss, step, part):
    """v <- soft(shrink v - lr (g(u) + decay u) + shift), u = scale v + offset, with autograd.

    Five models, of which the last takes no step, and two batches of different width. Where a part
    moves, the other parameters keep their bits.
    """
    torch.manual_seed(0)
    model = NETWORKS[network]().double()
    space, rng = ParameterSpace(model), torch.Generator().manual_seed(1)

    def rows():
        return 0.1 * torch.randn(5, space.size, generator=rng, dtype=torch.float64)

    start, taken = space.vector.detach() + rows(), STEPS[step](rows)
    moves = torch.full((space.size,), part is None)
    if part is not None:
        for layer in space.layers[PARTS[part]]:
            moves[layer.span] = True
        taken = taken._replace(part=moves)
    batches = []
    for counts in ([5, 5, 3, 1], [4, 2, 1]):
        inputs = torch.randn(len(counts), counts[0], 1, 16, 16, generator=rng, dtype=torch.float64)
        targets = torch.randint(3, inputs.shape[:2], generator=rng)
        batches.append(Batch(inputs, targets, counts))

    expected, losses = start.clone(), []
    function = SOFT if loss is SOFT else nn.functional.cross_entropy
    for batch in batches:
        for c, n in enumerate(batch.counts):
            at = expected[c] * (1 if taken.scale is None else taken.scale[c])
            at = at + (0 if taken.offset is None else taken.offset[c])
            at.requires_grad_()
            outputs = torch.func.functional_call(model, space.split(at), (batch.inputs[c, :n],))
            losses.append(function(outputs, batch.targets[c, :n]))
            (g,) = torch.autograd.grad(losses[-1], at)
            v = taken.shrink * expected[c] - taken.lr * (g + taken.decay * at.detach())
            v += 0 if taken.shift is None else taken.shift[c]
            v = soft(v, taken.threshold) * (1 if taken.mask is None else taken.mask[c])
            expected[c] = torch.where(moves, v, expected[c])
    for engine in ("sequential", "vmap", "auto", "debug", "own"):
        if engine == "vmap" and network == "LeNet5":
            continue  # convolutions: `auto` is the chain
        oracle = Oracle(model, space, loss, "sequential" if engine == "own" else engine)
        oracle.inspect(batches[0].inputs[0], batches[0].targets[0])
        v = start.clone()
        blocks = [StepBlock.of(batch, v.dtype) for batch in batches]
        descend = Functional(oracle.runner).descend if engine == "own" else oracle.descend
        seen, counts = descend(v, blocks, taken)
        torch.testing.assert_close(v, expected, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(seen, torch.stack(losses), rtol=1e-11, atol=1e-12)
        assert counts == [n for batch in batches for n in batch.counts]
        assert torch.equal(v[4], start[4])
        assert torch.equal(v[:, ~moves], start[:, ~moves])
        assert torch.equal(v == 0, expected == 0)  # the zeros of a sparse model are exact


class Everything(FedProx):
    """Local training with every term."""

    def client_update(self, clients, w):
        arguments = dict(linear=0.01 * w, prox_weight=0.3, prox_center=w, l1=0.02, offset=0.5 * w)
        return self.local_sgd(clients, 0.5 * w, **arguments)


class Told(FedProx):
    """The same, with the sparse term as an operator of the method's own."""

    def client_update(self, clients, w):
        def prox(v, lr):
            return soft(v, 0.02 * lr)

        terms = {"linear": 0.01 * w, "prox_weight": 0.3, "prox_center": w, "offset": 0.5 * w}
        return self.local_sgd(clients, 0.5 * w, prox=prox, **terms)


@pytest.mark.parametrize("network", [lambda: MLP(64, (8,)), lambda: SmallCNN(width=4)])
def test_terms_mean_the_same_with_an_optimizer_and_with_an_operator(tmp_path, network):
    """An optimizer of plain SGD takes the plain steps; all terms together, in 64-true."""
    ends = []
    for number, (kind, extra) in enumerate(
        [(Everything, {}), (Everything, {"optimizer": torch.optim.SGD}), (Told, {})]
    ):
        torch.manual_seed(0)
        method = kind(network(), lr=0.05, weight_decay=0.1, batch_size=10, **extra)
        data = DigitsDataModule(None, Sizes([60, 50, 40, 30, 20, 10]))
        run(method, data, 2, root=tmp_path / str(number), evaluate=(), clients_per_round=4)
        ends.append((method.global_model, method.row["train/loss"]))
    for w, loss in ends[1:]:
        torch.testing.assert_close(w, ends[0][0], rtol=1e-10, atol=1e-12)
        assert loss == pytest.approx(ends[0][1], rel=1e-10)
