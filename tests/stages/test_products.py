"""The mean of the clients' products B A beside the means of their factors, in NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from pfl.communication import Message
from pfl.parameters import ParameterSpace
from pfl.stages.factors import PRODUCTS, Factors, split_products
from pfl.stages.mean import Arrived
from pfl.stages.products import MeanWithProducts

SIZES = np.array([3, 1])
SCALE = 1.5


class Pair(nn.Module):
    """A bias, A [2, 4] and B [3, 2]: 3 + 8 + 6 values."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3).double())
        self.lora_A = nn.Parameter(torch.zeros(2, 4).double())
        self.lora_B = nn.Parameter(torch.zeros(3, 2).double())


def made(weighting):
    layers = {layer.name: layer for layer in ParameterSpace(Pair()).layers}
    pair = Factors(layers["lora_A"], layers["lora_B"], None, SCALE)
    return MeanWithProducts(weighting, [pair])


def means_of(mean, messages, sizes=SIZES):
    like = torch.zeros(17, dtype=torch.float64)
    sums = mean.sums(messages, sizes, like)
    row = {}
    return mean.means(Arrived(np.arange(2), sizes, float(sizes.sum()), sums), row), row


@pytest.mark.parametrize(("weighting", "p"), [("samples", [3, 1]), ("uniform", [1, 1])])
@pytest.mark.parametrize("own", [None, "samples", "uniform"])
def test_products_are_averaged_as_the_models_are(weighting, p, own):
    models = np.random.default_rng(0).normal(size=(2, 17))
    message = Message(torch.from_numpy(models), 136, weighting=own)
    mean = made(weighting)
    means, row = means_of(mean, {"w": message})
    if own is not None:
        p = {"samples": [3, 1], "uniform": [1, 1]}[own]
    products = [SCALE * w[11:].reshape(3, 2) @ w[3:11].reshape(2, 4) for w in models]
    expected = np.average(products, axis=0, weights=p)
    w = np.average(models, axis=0, weights=p)
    of_means = SCALE * w[11:].reshape(3, 2) @ w[3:11].reshape(2, 4)
    np.testing.assert_allclose(means["w"], w, rtol=1e-14)
    (found,) = split_products(mean.factors, means[PRODUCTS])
    np.testing.assert_allclose(found, expected, rtol=1e-13)
    gap = np.linalg.norm(expected - of_means) / np.linalg.norm(expected)
    assert row == pytest.approx({"train/aggregation_gap": gap})


def test_factors_that_are_zero_have_no_gap():
    means, row = means_of(made("samples"), {"w": Message(torch.zeros(2, 17).double(), 136)})
    assert not means[PRODUCTS].any()
    assert row == {}


@pytest.mark.parametrize("messages", [{"c": 17}, {"w": 5}, {}], ids=str)
def test_messages_that_are_no_models_have_no_products(messages):
    given = {
        name: Message(torch.ones(2, size).double(), 8 * size) for name, size in messages.items()
    }
    means, row = means_of(made("samples"), given)
    assert means.keys() == messages.keys()
    assert row == {}


def test_no_samples_have_no_mean():
    message = Message(torch.ones(2, 17).double(), 136)
    assert means_of(made("samples"), {"w": message}, np.zeros(2, np.int64)) == (None, {})
