"""Clients that move nothing leave the models where they are, however little a rule lets through.

Their rates are nearly zero, and their gradients are not. A message that a rule measures from a
wrong reference is scaled with the model in it.
"""

import inspect
import re
from dataclasses import replace

import numpy as np
import pytest

from pfl.aggregation.privacy import Privacy
from pfl.aggregation.robust import Median, NormBound
from pfl.algorithms import FedAvg
from pfl.errors import ConfigError
from tests.algorithms.methods import EVERY_METHOD, METHODS, small_network, small_world

# Limits far smaller than the models, whose norm is 2.9.
RULES = {
    "privacy": {"privacy": Privacy(clip=1e-3, noise_multiplier=0.0)},
    "NormBound": {"aggregation": NormBound(1e-3)},
    "Median": {"aggregation": Median()},
}


RATE = 1e-15


def ends(fit, method, **rule):
    """The global model and the personalized ones after two rounds."""
    rates = [n for n in inspect.signature(method.kind).parameters if re.search("_lr$|^inner_", n)]
    arguments = {**method.arguments, **dict.fromkeys(rates, RATE)}
    steps = dict(lr=RATE, local_epochs=2, batch_size=2, loss=method.loss)
    algorithm = method.kind(small_network(), **arguments, **steps)
    fit(algorithm, small_world(classes=method.classes), 2, evaluate=(), **rule)
    ends = {"w": algorithm.global_model.numpy().copy()}
    if algorithm.has_personalized:
        for clients in algorithm.iter_clients("train"):
            models = algorithm.personalized(clients).numpy()
            ends |= {f"w_{i}": model for i, model in zip(clients.ids, models, strict=True)}
    return ends


def assert_idle(fit, method, rules=RULES):
    """The ends are those without a rule; a server may have steps of its own, such as a prox."""
    expected = ends(fit, method)
    for rule in rules.values():
        try:
            actual = ends(fit, method, **rule)
        except ConfigError as error:
            (key,) = rule
            assert str(error).startswith(f"loop.{key}: ")
            continue
        for name, model in expected.items():
            np.testing.assert_allclose(actual[name], model, rtol=0, atol=1e-12, err_msg=name)


@EVERY_METHOD
def test_idle_clients_leave_the_models_where_they_are(fit, method):
    assert_idle(fit, method)


class Scaled(FedAvg):
    """Sends under the name "w" what is not near the received model."""

    def client_update(self, clients, w):
        return 2 * super().client_update(clients, w)

    def server_update(self, received):
        super().server_update({"w": received["w"] / 2})


@pytest.mark.parametrize("name", ["privacy", "NormBound"])
def test_a_message_with_a_wrong_reference_would_show(fit, name):
    with pytest.raises(AssertionError):
        assert_idle(fit, replace(METHODS["FedAvg"], kind=Scaled), {name: RULES[name]})
