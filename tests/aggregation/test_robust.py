"""Rules that replace means: second implementations, and where each rule breaks down."""

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from models import HalfSquaredError
from pfl import ConfigError
from pfl.aggregation.attacks import Attack, Attackers, SignFlip
from pfl.aggregation.privacy import Privacy
from pfl.aggregation.robust import (
    Bulyan,
    GeometricMedian,
    Krum,
    Median,
    NormBound,
    RobustMean,
    Rule,
    TrimmedMean,
)
from pfl.algorithms import SCAFFOLD, FedAvg
from tests.algorithms.methods import BATCHES, METHODS, small_network, small_world

FAR = 1e6
# Rules for n = 11 clients, with the number of attackers that each withstands.
RULES = {
    "Median": (Median(), 5),
    "TrimmedMean": (TrimmedMean(0.3), 3),
    "GeometricMedian": (GeometricMedian(), 5),
    "Krum": (Krum(4), 4),
    "MultiKrum": (Krum(4, keep=3), 4),
    "Bulyan": (Bulyan(2), 2),
}


def krum_by_hand(rows, f, keep=1):
    """Blanchard et al., Section 4, client by client."""
    n, scores = len(rows), []
    for i in range(n):
        distances = sorted(((rows[i] - rows[j]) ** 2).sum() for j in range(n) if j != i)
        scores.append(sum(distances[: max(1, n - f - 2)]))
    return rows[sorted(range(n), key=lambda i: scores[i])[:keep]].mean(0)


def bulyan_by_hand(rows, f):
    """El Mhamdi et al., Section 4: θ = n - 2 f choices by Krum, then β = θ - 2 f middle values."""
    left, chosen = list(range(len(rows))), []
    while len(chosen) < len(rows) - 2 * f:
        winner = krum_by_hand(rows[left], f)
        best = next(i for i in left if np.array_equal(rows[i], winner))
        chosen.append(rows[best])
        left.remove(best)
    result = []
    for values in np.stack(chosen, 1):
        by_distance = sorted(values, key=lambda v: abs(v - np.median(values)))
        result.append(np.mean(by_distance[: len(chosen) - 2 * f]))
    return np.array(result)


def trimmed_by_hand(rows, share):
    cut = int(share * len(rows))
    return np.array([np.mean(sorted(values)[cut : len(rows) - cut]) for values in rows.T])


def bounded_by_hand(rows, limit):
    limit = limit or np.median(np.linalg.norm(rows, axis=1))
    return np.mean([x * min(1.0, limit / np.linalg.norm(x)) for x in rows], axis=0)


BY_HAND = [
    (Median(), lambda x: np.median(x, 0)),
    (TrimmedMean(0.2), lambda x: trimmed_by_hand(x, 0.2)),
    (Krum(2), lambda x: krum_by_hand(x, 2)),
    (Krum(2, keep=4), lambda x: krum_by_hand(x, 2, 4)),
    (Bulyan(1), lambda x: bulyan_by_hand(x, 1)),
    (Bulyan(2), lambda x: bulyan_by_hand(x, 2)),
    (NormBound(0.7), lambda x: bounded_by_hand(x, 0.7)),
    (NormBound(), lambda x: bounded_by_hand(x, None)),
]


@pytest.mark.parametrize("n", [11, 12])
@pytest.mark.parametrize(("rule", "by_hand"), BY_HAND, ids=lambda x: type(x).__name__)
def test_rules_equal_second_implementations(rule, by_hand, n):
    rows = np.random.default_rng(n).normal(size=(n, 6))
    actual = rule(torch.from_numpy(rows)).numpy()
    np.testing.assert_allclose(actual, by_hand(rows), rtol=0, atol=1e-13)


@pytest.mark.parametrize("n", [5, 8])
def test_the_geometric_median_has_the_smallest_sum_of_distances(n):
    rows = np.random.default_rng(n).normal(size=(n, 3))

    def total(x):
        return np.linalg.norm(rows - x, axis=1).sum()

    found = GeometricMedian()(torch.from_numpy(rows)).numpy()
    best = minimize(total, rows.mean(0), method="Nelder-Mead", options={"xatol": 1e-9}).x
    np.testing.assert_allclose(found, best, rtol=0, atol=1e-5)
    # Three points in a line: the middle one, which is a point of the data.
    line = torch.tensor([[0.0], [1.0], [9.0]], dtype=torch.float64)
    assert float(GeometricMedian()(line)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(("steps", "tolerance"), [(1, 0.0), (3, 0.0), (1000, 0.3), (1000, 0.03)])
def test_the_geometric_median_ends_as_it_says(steps, tolerance):
    """Weiszfeld's iteration from the median, until it moves by `tolerance` d at most."""
    rows = np.random.default_rng(4).normal(size=(6, 3)) ** 3
    x = np.median(rows, 0)
    far = np.sort(np.linalg.norm(rows - x, axis=1))
    d = far[2]  # of an even number torch takes the lower middle value
    moved = []
    while len(moved) < steps and (not moved or moved[-1] > tolerance * d):
        weights = 1 / np.maximum(1e-6 * d, np.linalg.norm(rows - x, axis=1))
        before = x
        x = weights @ rows / weights.sum()
        moved.append(np.linalg.norm(x - before))
    assert len(moved) == steps or 1 < len(moved) < 20
    rule = GeometricMedian(steps)
    rule.tolerance = tolerance
    np.testing.assert_allclose(rule(torch.from_numpy(rows)), x, rtol=0, atol=1e-12)


def attacked(rule, attackers, seed=0):
    """How far from the honest clients' hull a rule ends: 8 in all, far away and all alike."""
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy(rng.normal(size=(11, 4)))
    rows[:attackers] = FAR
    return float(rule(rows).abs().max())


@pytest.mark.parametrize("name", RULES)
def test_a_rule_holds_at_its_bound_and_fails_one_attacker_beyond(name):
    rule, bound = RULES[name]
    assert attacked(rule, bound) < 10
    beyond = bound + 1
    # Krum's bound is one of its proof; what it cannot withstand is a majority of its neighbours:
    # n - f - 2 = 5 colluding clients beside one are a cluster without any distance.
    if name in ("Krum", "MultiKrum"):
        beyond = 6
    if name == "Bulyan":
        # θ = 7 of 11 are chosen; with four attackers among them β = 3 middle values can be theirs.
        beyond = 6
    assert attacked(rule, beyond) > FAR / 20


def test_a_trimmed_mean_counts_whole_clients_in_spite_of_rounding():
    """0.29 * 100 is 28.999999999999996 in floating-point numbers; 29 clients are left out."""
    rows = torch.arange(100, dtype=torch.float64)[:, None] ** 2
    middle = np.mean(np.arange(29, 71) ** 2)
    assert TrimmedMean(0.29)(rows).item() == pytest.approx(middle, rel=1e-12)


def test_a_norm_bound_limits_what_attackers_move():
    """f of n attackers move the mean by at most 2 limit f / n; the mean itself has no limit."""
    rng = np.random.default_rng(1)
    honest = rng.normal(size=(11, 4))
    without = NormBound(1.0)(torch.from_numpy(honest))
    for attackers in (1, 5, 10):
        rows = torch.from_numpy(honest.copy())
        rows[:attackers] = FAR
        assert float((NormBound(1.0)(rows) - without).norm()) <= 2 * attackers / 11
        assert float(rows.mean(0).norm()) > FAR / 20


def test_krum_leaves_out_every_set_of_two_attackers():
    rows = torch.from_numpy(np.random.default_rng(2).normal(size=(7, 3)))
    for pair in combinations(range(7), 2):
        changed = rows.clone()
        changed[list(pair)] = torch.tensor([FAR, -FAR, FAR], dtype=torch.float64)
        assert float(Krum(2)(changed).abs().max()) < 10


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (Krum(3), "loop.aggregation: Krum needs at least 9 clients' messages in a round"),
        (Bulyan(2), "loop.aggregation: Bulyan needs at least 11 clients' messages in a round"),
    ],
)
def test_too_few_clients_are_named(rule, line):
    with pytest.raises(ConfigError) as error:
        rule(torch.zeros(8, 2))
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("kind", "arguments", "line"),
    [
        (TrimmedMean, {"share": 0.5}, "TrimmedMean.share: 0.5; it must be at least 0 and below"),
        (TrimmedMean, {"share": -0.1}, "TrimmedMean.share: -0.1; it must be at least 0"),
        (GeometricMedian, {"steps": 0}, "GeometricMedian.steps: 0; it must be a whole number"),
        (Krum, {"attackers": -1}, "Krum.attackers: -1; it must be a whole number of at least 0"),
        (Krum, {"attackers": 1, "keep": 0}, "Krum.keep: 0; it must be a whole number of at least"),
        (Bulyan, {"attackers": -1}, "Bulyan.attackers: -1; it must be a whole number of at least"),
        (NormBound, {"limit": 0.0}, "NormBound.limit: 0.0; it must be positive, or null"),
    ],
)
def test_impossible_arguments_of_rules_are_refused(kind, arguments, line):
    with pytest.raises(ConfigError) as error:
        kind(**arguments)
    assert str(error.value).startswith(line)


def test_no_attackers_can_be_told_to_krum_and_bulyan():
    """Of 0, 1, 3 and 7 the sums of the two smallest squared distances are 1 + 9, 1 + 4, 4 + 9 and
    16 + 36; Bulyan chooses all, and averages all."""
    rows = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    assert Krum(attackers=0)(rows).tolist() == [1.0]
    assert Bulyan(attackers=0)(rows).tolist() == [11 / 4]


# ---- in a round ---------------------------------------------------------------------------------


def test_a_message_that_is_not_finite_counts_as_no_change():
    rows = {"w": torch.tensor([[1.0, 2.0], [float("nan"), 9.0], [5.0, 3.0]])}
    reference = {"w": torch.tensor([2.0, 2.0])}
    means = RobustMean(Median(), None).combine(rows, reference, {}, torch.zeros(3, dtype=bool))
    # Changes (-1, 0), (0, 0), (3, 1): medians 0 and 0.
    torch.testing.assert_close(means["w"], torch.tensor([2.0, 2.0]))


class Ones(Attack):
    """Attackers together send ones; a round without attackers, or of attackers only, has none."""

    def collude(self, honest, attackers):
        assert attackers and len(honest)
        return torch.ones(honest.shape[1])


@pytest.mark.parametrize(
    ("attacking", "expected"),
    [([True, False], 0.25), ([False, False], 0.0), ([True, True], 0.0)],
)
def test_attackers_collude_where_there_are_some_and_others(attacking, expected):
    """Weights 1/4 and 3/4 of two messages of zeros, measured from 2."""
    rows = {"w": torch.full((2, 3), 2.0)}
    reference = {"w": torch.full((3,), 2.0)}
    weights = {"w": torch.tensor([0.25, 0.75], dtype=torch.float64)}
    means = RobustMean(None, Ones()).combine(rows, reference, weights, torch.tensor(attacking))
    assert means["w"].tolist() == [2.0 + expected] * 3


@pytest.mark.parametrize(
    ("name", "made"),
    [("privacy", Privacy(1.0, 1.0)), ("aggregation", Median()), ("aggregation", NormBound(1.0))],
)
def test_the_row_says_how_many_messages_are_not_finite(fit, name, made):
    """Two of four clients send infinite values, in the second round; the model stays finite."""

    class Diverges(FedAvg):
        def client_update(self, clients, w):
            sent = super().client_update(clients, w).clone()
            sent[torch.from_numpy(clients.ids < 2 * clients.round), 0] = float("inf")
            return sent

    method = Diverges(small_network(), loss=HalfSquaredError(), **BATCHES)
    run = fit(method, small_world(), 2, clients_at_once=3, **{name: made})
    assert [row["not_finite"] for row in run.trainer.recorder.rows] == [0, 2]
    assert run.global_model.isfinite().all()


class AtOnce(Rule):
    """`NormBound(0.05)` of all messages together."""

    def __call__(self, rows):
        return NormBound(0.05)(rows)


class AsTheyCome(NormBound):
    def __call__(self, rows):
        raise AssertionError("the messages were kept")


@pytest.mark.parametrize("chunk", [4, 1])
def test_a_norm_bound_adds_messages_up_as_they_come(fit, chunk):
    runs = []
    for rule in (AtOnce(), AsTheyCome(0.05)):
        method = SCAFFOLD(small_network(), loss=HalfSquaredError(), **BATCHES)
        loop = dict(clients_per_round=3, clients_at_once=chunk, aggregation=rule)
        fit(method, small_world(), 3, attackers=Attackers([1], SignFlip(5.0)), **loop)
        runs.append(method.global_model)
    torch.testing.assert_close(*runs, rtol=0, atol=1e-14)


def test_without_trimming_the_rule_is_the_uniform_mean(fit):
    arguments = dict(weighting="uniform", loss=HalfSquaredError(), **BATCHES)
    plain, ruled = (FedAvg(small_network(), **arguments) for _ in range(2))
    fit(plain, small_world(), 3, clients_per_round=3)
    fit(ruled, small_world(), 3, clients_per_round=3, aggregation=TrimmedMean(0.0))
    torch.testing.assert_close(plain.global_model, ruled.global_model, rtol=0, atol=1e-14)


def test_the_median_of_two_rounds_by_hand(fit):
    """FedAvg's models of each client are those that it trains alone from the same model."""
    algorithm = FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES)
    fit(algorithm, small_world(), 2, aggregation=Median(), clients_at_once=3)
    models = []
    for rounds in (1, 2):
        alone = []
        for client in range(4):
            one = FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES)
            trace = [[] for _ in range(rounds - 1)] + [[client]]
            if models:
                one.global_model.copy_(torch.from_numpy(models[-1]))
            fit(one, small_world(), rounds, trace=trace)
            alone.append(one.global_model.numpy().copy())
        models.append(np.median(alone, 0))
    np.testing.assert_allclose(algorithm.global_model, models[-1], rtol=0, atol=1e-13)


KEPT = {
    *("CFL", "FedAMP", "HeurFedAMP", "FedGH", "FedACS", "FedACS, quantile 1", "pFedHN"),
    *("FedBuff", "FedAsync", "FedDistill", "FedTGP", "FedFomo", "APPLE", "FedDF"),
}
PRODUCTS = {"FedExLoRA", "FLoRA", "FlexLoRA"}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_a_rule_or_says_why_not(fit, name):
    """Chunks do not matter, and one attacker far away moves nothing far."""
    method = METHODS[name]
    runs = []
    for chunk in (4, 1):
        algorithm = method.make(small_network(), **BATCHES)
        loop = dict(aggregation=Median(), evaluate=(), clients_at_once=chunk)
        data = small_world(classes=method.classes)
        if name in KEPT | PRODUCTS or method.pooled:
            with pytest.raises(ConfigError, match=r"^loop\.aggregation: "):
                fit(algorithm, data, 2, **loop)
            return
        fit(algorithm, data, 2, **loop)
        runs.append(algorithm.global_model.clone())
    torch.testing.assert_close(*runs, rtol=0, atol=1e-12)
