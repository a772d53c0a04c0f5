"""How many sample gradients a round takes: what is counted, and what `cost` says."""

import numpy as np
import pytest

from pfl.algorithms import APFL, SCAFFOLD, Ditto, FedPD, FedSLR, FedSpa, pFedMe
from tests.algorithms.traced import BATCHES, SIZES

PASSES = [  # through a client's samples in two local epochs
    (APFL, {}, 2 + 2),  # of w_i and of v_i
    (Ditto, {"personal_epochs": 3}, 2 + 3),
    (FedSLR, {"personal_epochs": 3}, 2 + 3),
    (FedPD, {"communication_period": 2}, 2),
    (pFedMe, {"penalty": 5.0, "personal_steps": 3}, 3 * 2),  # three inner steps in each local step
    (SCAFFOLD, {"option": "I"}, 2 + 1),
    (SCAFFOLD, {"option": "II"}, 2),
]


@pytest.mark.parametrize(("kind", "arguments", "passes"), PASSES)
def test_a_round_takes_these_passes(fit, problem, kind, arguments, passes):
    algorithm = kind(problem.network(), **arguments, **BATCHES)
    fit(algorithm, problem, 1)
    assert algorithm.progress.samples == passes * sum(SIZES)
    assert algorithm.cost(np.array(SIZES)).tolist() == [passes * n for n in SIZES]


def test_a_mask_takes_a_mini_batch_more(fit, problem):
    """Mini-batches have up to 2 samples."""
    algorithm = FedSpa(problem.network(), density=0.9, **BATCHES)
    fit(algorithm, problem, 1)
    expected = [2 * n + min(n, 2) for n in SIZES]
    assert algorithm.progress.samples == sum(expected)
    assert algorithm.cost(np.array(SIZES)).tolist() == expected


@pytest.mark.parametrize("work", [{}, {str(i): {"work": 2} for i in range(4)}], ids=["1", "2"])
def test_oracle_two_takes_two_gradients_in_a_step_and_full_ones(fit, problem, work):
    """A full gradient in the first of two rounds, whatever the share of local steps is."""
    algorithm = FedPD(problem.network(), variance_reduction=True, refresh_period=2, **BATCHES)
    fit(algorithm, problem, 2, by_client=work or None)
    steps = 2 if work else 1
    assert algorithm.progress.samples == (2 * steps * 2 * 2 + 1) * sum(SIZES)
    assert algorithm.cost(np.array(SIZES)).tolist() == [4.5 * n for n in SIZES]
