"""How many sample gradients a round takes: what is counted, and what `cost` says."""

import numpy as np
import pytest

from pfl.algorithms import APFL, SCAFFOLD, Ditto, pFedMe
from tests.algorithms.traced import BATCHES, SIZES

PASSES = [  # through a client's samples in two local epochs
    (APFL, {}, 2 + 2),  # of w_i and of v_i
    (Ditto, {"personal_epochs": 3}, 2 + 3),
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
