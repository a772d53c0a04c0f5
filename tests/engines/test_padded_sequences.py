"""Padding of sequences: it counts neither in losses and gradients nor in accuracies."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from datamodules import SplitOwn
from models import CharLSTM
from pfl.algorithms import FedAvg, FedRep, LocalTrain
from pfl.engines import Batch, Oracle, default_loss
from pfl.parameters import ParameterSpace
from tests.networks import put
from tests.problems import owned, run

PAD = -100


class Next(nn.Module):
    """Scores [B, classes, T] of the next token, from each token [B, T] alone."""

    def __init__(self, classes=5):
        super().__init__()
        self.scores = nn.Embedding(classes, classes)

    def forward(self, tokens):
        return self.scores(tokens).transpose(1, 2)


def padded(*lengths, classes=5, width=6, seed=0):
    """Tokens and targets of sequences with these numbers of real targets."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(classes, (len(lengths), width), generator=g)
    targets = torch.randint(classes, (len(lengths), width), generator=g)
    for row, length in enumerate(lengths):
        targets[row, length:] = PAD
    return tokens, targets


def token_mean(network, tokens, targets):
    """PyTorch's own mean over the real targets of a batch."""
    return cross_entropy(network(tokens), targets, ignore_index=PAD)


@pytest.mark.parametrize("engine", ["sequential", "vmap", "auto", "debug"])
@pytest.mark.parametrize("loss", [default_loss, nn.CrossEntropyLoss(ignore_index=PAD)])
def test_gradients_are_those_of_the_mean_over_real_targets(engine, loss):
    """Three clients; the second has a sample less, the third has no real target at all."""
    torch.manual_seed(0)
    network = Next().double()
    space = ParameterSpace(copy.deepcopy(network))
    lengths = [(6, 2, 1), (4, 3), (0, 0, 0)]
    rows = [padded(*(*own, *[5] * (3 - len(own))), seed=i) for i, own in enumerate(lengths)]
    batch = Batch(
        torch.stack([tokens for tokens, _ in rows]),
        torch.stack([targets for _, targets in rows]),
        [len(own) for own in lengths],
    )
    oracle = Oracle(copy.deepcopy(network), space, loss, engine)
    oracle.inspect(batch.inputs[0], batch.targets[0], 5)
    w = torch.randn(3, space.size, dtype=torch.float64)
    values, g = oracle.gradient(w, batch)
    for c in range(2):
        alone, count = put(network, w[c]), batch.counts[c]
        expected = token_mean(alone, batch.inputs[c, :count], batch.targets[c, :count])
        expected.backward()
        torch.testing.assert_close(values[c], expected.detach())
        torch.testing.assert_close(g[c], alone.scores.weight.grad.flatten())
    assert values[2] == 0 and not g[2].any()


def test_scores_by_hand():
    """Token k is followed by k with probability p; client 0 has 3 of 5 right, client 1 1 of 2.

    The score of the right token is log 9, of the 4 others 0: p = 9 / 13, the others have 1 / 13.
    """
    network = Next()
    with torch.no_grad():
        network.scores.weight.copy_(math.log(9) * torch.eye(5))
    tokens = torch.tensor([[0, 1, 2], [3, 4, 0], [1, 2, 3]])
    targets = torch.tensor([[0, 1, 0], [3, 3, PAD], [1, 3, PAD]])
    right, wrong = math.log(13 / 9), math.log(13)
    for engine in ("sequential", "vmap"):
        oracle = Oracle(copy.deepcopy(network), ParameterSpace(network), default_loss, engine)
        oracle.inspect(tokens, targets, 5)
        losses, hits, _ = oracle.evaluate_one(oracle.space.vector.detach(), tokens, targets)
        assert hits.tolist() == pytest.approx([2 / 3, 1 / 2, 1 / 2])
        expected = [(2 * right + wrong) / 3, (right + wrong) / 2, (right + wrong) / 2]
        assert losses.tolist() == pytest.approx(expected)
        assert oracle.runner.target_counts(targets).tolist() == [3, 2, 2]


def data(tokens, targets, owners, test=0.0):
    return owned(np.array(owners), tokens, targets, protocol=SplitOwn(test=test, validation=0.0))


@pytest.mark.parametrize("method", [FedAvg, LocalTrain])
@pytest.mark.parametrize("pad", [PAD, 0])
def test_accuracy_and_loss_of_a_client_go_over_its_real_tokens(method, pad, tmp_path):
    """Both ways of scoring, by clients and by pools; the loss may have another index. The second
    client has fewer samples, which are padded where clients are scored together."""
    torch.manual_seed(0)
    tokens, targets = padded(6, 1, 3, 2, 5, 4, 6, 1, width=6)
    targets = torch.where(targets == PAD, pad, 1 + targets % 4)
    samples = data(tokens, targets, [0] * 6 + [1] * 2, test=0.5)  # three and one of them
    loss = None if pad == PAD else nn.CrossEntropyLoss(ignore_index=pad)
    algorithm = run(method(Next(), lr=0.5, loss=loss), samples, 2, root=tmp_path)
    kind = "global" if method is FedAvg else "personalized"
    scores = algorithm.evaluation.scores["test", kind]
    for client in (0, 1):
        network = Next().double()
        w = algorithm.global_model
        if method is LocalTrain:
            w = algorithm.store.read("w", np.array([client]))[0]
        nn.utils.vector_to_parameters(w, network.parameters())
        index = torch.from_numpy(samples.partition.test.of(np.array([client]))).long()
        x, y = tokens[index], targets[index]
        real = y != pad
        expected = cross_entropy(network(x), y, ignore_index=pad)
        hits = (network(x).argmax(1) == y)[real].double().mean()
        assert scores["count"][client] == int(real.sum())
        assert scores["loss"][client] == pytest.approx(expected.item())
        assert scores["accuracy"][client] == pytest.approx(hits.item())


@pytest.mark.parametrize("method", [FedAvg, FedRep])
def test_a_recurrent_network_does_not_see_the_targets_of_padding(method, tmp_path):
    """Other tokens in place of the padded ones, at the end, change nothing."""
    tokens, targets = padded(3, 2, 6, 4)
    other = torch.where(targets == PAD, (tokens + 1) % 5, tokens)
    models = []
    for given in (tokens, other):
        torch.manual_seed(0)
        network = CharLSTM(5, hidden=4, every_token=True)
        algorithm = method(network, lr=0.1, batch_size=2)
        models.append(run(algorithm, data(given, targets, [0, 0, 1, 1]), 2, root=tmp_path))
    assert not torch.equal(tokens, other)
    torch.testing.assert_close(models[0].global_model, models[1].global_model)
