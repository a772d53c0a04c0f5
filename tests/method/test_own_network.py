"""Two methods with one network object would train one model; the second run is refused."""

import copy
import gc
from weakref import ref

import pytest
from torch import nn

from models import HalfSquaredError
from pfl.algorithms import FedAvg, LocalTrain
from tests.problems import run, scalar_problem
from tests.refusal import refused

SETTINGS = dict(lr=0.5, batch_size=None, loss=HalfSquaredError())


def test_a_second_method_with_a_trained_network_is_refused(tmp_path):
    """One step a round on (w - 1)^2 / 2 multiplies w - 1 by 1/2: 3, 2 after the first run.

    Without the refusal the second run would begin at 2 and end at 1.5, as the first model would.
    """
    problem = scalar_problem([1.0])
    network = problem.network(3.0)
    untrained = copy.deepcopy(network)
    first = FedAvg(network, **SETTINGS)
    second = FedAvg(network, **SETTINGS)
    run(first, problem, 1, root=tmp_path)
    for method in (second, FedAvg(network, **SETTINGS)):
        with refused("model.network: this ", "another method", "copy.deepcopy(network)"):
            run(method, problem, 1, root=tmp_path)
    assert float(first.global_model) == pytest.approx(2.0, abs=1e-12)
    alone = FedAvg(untrained, **SETTINGS)
    run(alone, problem, 1, root=tmp_path)
    assert float(alone.global_model) == pytest.approx(2.0, abs=1e-12)
    assert float(first.global_model) == pytest.approx(2.0, abs=1e-12)


def test_a_network_and_its_method_are_not_kept(tmp_path):
    problem = scalar_problem([1.0])
    method = FedAvg(problem.network(3.0), **SETTINGS)
    run(method, problem, 1, root=tmp_path)
    kept = [ref(method.space), ref(method.network)]
    del method
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_a_method_goes_on_with_its_own_network_and_with_a_copy(tmp_path):
    """3, 2, 1.5 after two rounds; a copy goes on from there to 1.25."""
    problem = scalar_problem([1.0])
    first = FedAvg(problem.network(3.0), **SETTINGS)
    run(first, problem, 1, root=tmp_path)
    with pytest.warns(UserWarning, match="has been through 1 rounds"):
        run(first, problem, 1, root=tmp_path)
    other = FedAvg(copy.deepcopy(first.network), **SETTINGS)
    run(other, problem, 1, root=tmp_path)
    assert float(first.global_model) == pytest.approx(1.5, abs=1e-12)
    assert float(other.global_model) == pytest.approx(1.25, abs=1e-12)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_part_may_be_shared_only_where_it_is_frozen(frozen, tmp_path):
    problem = scalar_problem([1.0])
    body = nn.Linear(1, 1).double().requires_grad_(not frozen)
    heads = [nn.Linear(1, 1).double() for _ in range(2)]
    run(FedAvg(nn.Sequential(body, heads[0]), **SETTINGS), problem, 1, root=tmp_path)
    other = LocalTrain(nn.Sequential(body, heads[1]), **SETTINGS)
    if frozen:
        run(other, problem, 1, root=tmp_path)
        return
    with refused("model.network: this Sequential, or a part of it, is already another method's"):
        run(other, problem, 1, root=tmp_path)
