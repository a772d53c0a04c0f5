"""ε of a run: beside published numbers, other libraries, and the plain Gaussian mechanism."""

import logging
import math
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from pfl import ConfigError
from pfl.aggregation.accountant import Accountant, least_wait, most_uses
from tests.aggregation.gaussian import gaussian_delta


def classical(accountant, rounds):
    """ε by the conversion of the first papers: min over orders of R ρ(α) + log(1/δ) / (α - 1)."""
    orders, divergences = accountant._curve
    whole = (orders == np.round(orders)) & (orders <= 64)
    values = rounds * divergences[whole] + math.log(1 / accountant.delta) / (orders[whole] - 1)
    return values.min()


def test_published_numbers():
    """Abadi et al. 2016 print 1.26; McMahan et al. 2018 4.634 for 763,430 users, 5,000 a round.

    Both with the conversion of their time, which gives more than ours.
    """
    abadi = Accountant(4.0, 1e-5, "bernoulli", 1, 100)
    assert classical(abadi, 10_000) == pytest.approx(1.26, abs=5e-3)
    users = Accountant(1.0, 1e-9, "bernoulli", 5000, 763_430)
    assert classical(users, 5000) == pytest.approx(4.634, abs=5e-4)
    assert abadi.epsilon(10_000) < 1.26 and users.epsilon(5000) < 4.634


SETTINGS = [  # z, clients a round of 1,000, rounds
    *((1.0, 10, 100), (0.7, 50, 30), (4.0, 5, 2000), (1.0, 100, 100), (0.6, 100, 60)),
    *((2.0, 100, 1000), (8.0, 200, 500), (1.5, 20, 300), (0.8, 30, 10), (3.0, 300, 100)),
]


@pytest.mark.parametrize(("z", "cohort", "rounds"), SETTINGS)
def test_another_librarys_accountant_agrees(z, cohort, rounds):
    package = find_spec("opacus")  # its one file: the package's optimizers would be in helps
    if package is None or package.origin is None:
        pytest.skip("opacus is not installed")
    path = Path(package.origin).parent / "accountants" / "analysis" / "rdp.py"
    spec = spec_from_file_location("opacus_rdp", path)
    rdp = module_from_spec(spec)
    spec.loader.exec_module(rdp)
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(11, 256))
    curve = rdp.compute_rdp(q=cohort / 1000, noise_multiplier=z, steps=rounds, orders=orders)
    expected, _ = rdp.get_privacy_spent(orders=orders, rdp=curve, delta=1e-5)
    actual = Accountant(z, 1e-5, "bernoulli", cohort, 1000).epsilon(rounds)
    assert actual == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("z", "cohort", "rounds"), SETTINGS)
def test_the_distribution_of_privacy_losses_gives_no_more(z, cohort, rounds):
    """Its ε is nearly exact; that of Rényi divergences is an upper bound of it."""
    library = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    one = library.PoissonSampledDpEvent(cohort / 1000, library.GaussianDpEvent(z))
    tight = pld.PLDAccountant(value_discretization_interval=1e-3)
    bound = Accountant(z, 1e-5, "bernoulli", cohort, 1000).epsilon(rounds)
    exact = tight.compose(one, rounds).get_epsilon(1e-5)
    assert exact <= bound * 1.001


def test_all_clients_are_the_plain_gaussian():
    """R rounds with noise z are one Gaussian with sensitivity sqrt(R) / z; ours bounds its ε."""
    accountant = Accountant(5.0, 1e-5, "all", 40, 40)
    epsilon = accountant.epsilon(100)
    assert gaussian_delta(epsilon, math.sqrt(100) / 5.0) < 1e-5
    assert gaussian_delta(0.85 * epsilon, math.sqrt(100) / 5.0) > 1e-5


def test_a_fixed_number_of_clients_counts_the_replacement_of_one():
    """All 40 of 40 clients drawn are all clients, of which one is replaced: twice the change."""
    drawn = Accountant(4.0, 1e-5, "uniform", 40, 40).epsilon(10)
    assert drawn == pytest.approx(Accountant(2.0, 1e-5, "all", 40, 40).epsilon(10), rel=1e-9)


def test_weighted_sampling_counts_whom_a_client_displaces():
    """A client with nearly all samples is drawn in place of another: the sum has C for -C.

    Ten rounds with noise z are one Gaussian with sensitivity 2 sqrt(10) / z, without amplification.
    """
    epsilon = Accountant(4.0, 1e-5, "weighted", 1, 3).epsilon(10)
    assert gaussian_delta(epsilon, 2 * math.sqrt(10) / 4.0) < 1e-5
    assert gaussian_delta(0.85 * epsilon, 2 * math.sqrt(10) / 4.0) > 1e-5


def test_a_trace_counts_the_client_that_takes_part_most_often():
    trace = [[0, 1], [1, 2], [3], [1]]
    assert most_uses(trace).tolist() == [1, 2, 2, 3]
    run = Accountant(2.0, 1e-5, "all", 2, 4, most_uses(trace))
    plain = Accountant(2.0, 1e-5, "all", 2, 4)
    assert [run.epsilon(n) for n in (1, 2, 3, 4)] == [plain.epsilon(n) for n in (1, 2, 2, 3)]


def test_before_the_first_client_of_a_trace_nothing_is_revealed():
    assert most_uses([[], [2], []]).tolist() == [0, 1, 1]
    assert Accountant(2.0, 1e-5, "all", 1, 4, most_uses([[], [2]])).epsilon(1) == 0.0


def test_clients_of_a_trace_wait():
    """For two rounds, for three, and for all of them where nobody comes again."""
    assert least_wait([[0, 1], [2], [1], [0]]) == 2
    assert least_wait([[0], [1], [2], [0]]) == 3
    assert least_wait([[0], [1], [2]]) == 3


def test_messages_of_other_libraries_are_shown_again_afterwards():
    """The accountant silences the log of its library while it computes a curve."""
    log = logging.getLogger("absl")
    assert not log.disabled
    assert Accountant(2.0, 1e-5, "bernoulli", 1, 4).epsilon(1) > 0
    assert not log.disabled


@pytest.mark.parametrize(("epsilon", "rounds"), [(0.5, 10), (40.0, 1), (2.0, 300)])
def test_the_noise_for_a_budget_is_the_least(epsilon, rounds):
    """To 4 digits: with 2e-4 of it less ε is above the budget."""
    found = Accountant(0.0, 1e-5, "all", 4, 4).calibrate(epsilon, rounds)
    less = Accountant(found.noise_multiplier * (1 - 2e-4), 1e-5, "all", 4, 4)
    assert found.epsilon(rounds) <= epsilon < less.epsilon(rounds)


def test_a_budget_that_no_noise_reaches_is_refused():
    """Whatever the noise, Rényi divergences of orders up to about 1,000 give at least
    (log(1/δ) - log 1000) / 1000 = 0.014."""
    with pytest.raises(ConfigError, match=r"^loop\.privacy\.epsilon: 0\.001; no noise reaches it"):
        Accountant(0.0, 1e-9, "all", 4, 4).calibrate(1e-3, 10)


def test_the_rounds_within_a_budget():
    """The last round whose ε is at most the budget, and the limit where all are."""
    run = Accountant(3.0, 1e-5, "all", 4, 4)
    budget = run.epsilon(7)
    assert [run.rounds_within(budget, limit) for limit in (5, 7, 8, 50)] == [5, 7, 7, 7]
    assert run.rounds_within(budget * (1 - 1e-9), 50) == 6
    assert run.rounds_within(run.epsilon(1) / 2, 50) == 0
