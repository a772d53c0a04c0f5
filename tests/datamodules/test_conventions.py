"""The conventions of other projects, against slow implementations sample by sample.

A reference draws its random numbers in the same order from an equal generator, so that the numbers
of samples of each client and class must be equal.
"""

import json
import re
from importlib import import_module
from math import ceil

import jsonargparse
import numpy as np
import pytest

import datamodules
from datamodules import (
    LEAF,
    Dirichlet,
    FedSLRDirichlet,
    FLBenchClasses,
    FlukeClasses,
    FlukeDirichlet,
    FlukeQuantity,
    Partitioner,
    PFLlibDirichlet,
    PFLlibPathological,
    TensorDataModule,
)
from tests.sources import ROOT

LABELS = np.random.default_rng(9).integers(0, 6, 900)
SIZES = np.bincount(LABELS).tolist()


def table(rule, labels=LABELS, clients=7, seed=0):
    """Returns the number of samples of each client and class, [M, K], counted one by one."""
    owned = rule.assign(labels, clients, np.random.default_rng(seed))
    counts = np.zeros((clients, labels.max() + 1), int)
    for client in range(clients):
        for sample in owned[client]:
            counts[client, labels[sample]] += 1
    return counts


# ---- FedSLR --------------------------------------------------------------------------------------


def test_fedslr_draws_labels_by_each_client_s_own_distribution():
    """Counts of n samples are Dirichlet-multinomial, whatever the other clients draw.

    E = 1/K and Var(count / n) = (1/K) (1 - 1/K) (n + A) / (n (1 + A)) with A = K α. A class that
    runs out makes one draw of each 300 or so void, which changes a share by less than a hundredth.
    """
    labels, alpha = np.repeat(np.arange(5), 4000), 0.2
    shares = table(FedSLRDirichlet(alpha), labels, 400) / 50
    total = 5 * alpha
    variance = 0.2 * 0.8 * (50 + total) / (50 * (1 + total))
    squares = (shares - 0.2) ** 2
    error = 5 * squares.std() / np.sqrt(squares.size / 5) + variance / 100
    assert abs(squares.mean() - variance) < error
    # `Dirichlet(α, over="labels")` with the same number has a fifth of the concentration.
    other = table(Dirichlet(alpha, over="labels"), labels, 400) / 50
    assert ((other - 0.2) ** 2).mean() > variance * 1.3


def test_fedslr_repeats_images_only_when_their_class_has_run_out():
    labels = np.repeat([0, 1], 50)
    for seed in range(20):
        owned = FedSLRDirichlet(0.1).assign(labels, 4, np.random.default_rng(seed))
        assert owned.sizes.tolist() == [25] * 4
        times = np.bincount(owned.flat, minlength=100).reshape(2, 50)
        for row in times:  # a class is used up before any of its images comes again
            assert row.max() - row.min() <= 1
        if times.sum(1).max() > 50:
            break
    else:
        pytest.fail("no class has run out")


def test_fedslr_gives_the_remainder_to_the_first_client():
    owned = FedSLRDirichlet(1.0).assign(LABELS[:107], 10, np.random.default_rng(0))
    assert owned.sizes.tolist() == [17, *[10] * 9]


# ---- PFLlib --------------------------------------------------------------------------------------


def pfllib_dirichlet(rng, alpha, clients, least):
    """PFLlib's "dir", label by label and client by client."""
    while True:
        held = [[0] * 6 for _ in range(clients)]
        for label, samples in enumerate(SIZES):
            shares = rng.dirichlet([alpha] * clients)
            shares = [
                p if sum(h) < 900 / clients else 0.0 for p, h in zip(shares, held, strict=True)
            ]
            before, run = 0, 0.0
            for client, share in enumerate(shares):
                run += share / sum(shares)
                end = samples if client == clients - 1 else int(run * samples)
                held[client][label] += end - before
                before = end
        if min(sum(h) for h in held) >= least:
            return held


@pytest.mark.parametrize("seed", range(5))
def test_pfllib_dirichlet_equals_its_reference(seed):
    # L = min(10 / (1 - 0.75), 900 / (2 * 7)) = min(40, 64.3)
    found = table(PFLlibDirichlet(0.3), seed=seed)
    assert found.tolist() == pfllib_dirichlet(np.random.default_rng(seed), 0.3, 7, 40)


def test_pfllib_dirichlet_refuses_an_unreachable_least_number(one_line):
    with one_line("PFLlibDirichlet.alpha: 0.0001; with num_clients=50 it must be larger", "9 sam"):
        table(PFLlibDirichlet(1e-4), np.zeros(900, int), clients=50)


def pfllib_pathological(rng, classes, balance, clients, least):
    """PFLlib's "pat", one client at a time."""
    places, held = [classes] * clients, [[0] * 6 for _ in range(clients)]
    for label, samples in enumerate(SIZES):
        who = [i for i in range(clients) if places[i] > 0][: ceil(clients / 6 * classes)]
        if not who:
            break
        mean = samples / len(who)
        drawn = [int(mean)] * len(who)
        if not balance and len(who) > 1:
            drawn = rng.integers(int(max(mean / 10, least / 6)), int(mean), len(who)).tolist()
        drawn[-1] = samples - sum(drawn[:-1])
        for client, number in zip(who, drawn, strict=True):
            held[client][label] += number
            places[client] -= 1
    return held


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("classes", [1, 2, 5])
def test_pfllib_pathological_equals_its_reference(classes, balance):
    found = table(PFLlibPathological(classes, balance), clients=12)
    least = int(min(40, 900 / 24))
    expected = pfllib_pathological(np.random.default_rng(0), classes, balance, 12, least)
    assert found.tolist() == expected
    assert ((found > 0).sum(1) <= classes).all()


def test_pfllib_s_arguments_are_checked(one_line):
    with one_line("PFLlibDirichlet.alpha: -1; it must be positive"):
        PFLlibDirichlet(-1)
    with one_line("PFLlibPathological.classes: 7; it must be at most 6"):
        table(PFLlibPathological(7))
    with one_line("num_clients: 600; it must be fewer, as class number 0 has only"):
        table(PFLlibPathological(6), clients=600)


# ---- FL-bench ------------------------------------------------------------------------------------


def test_flbench_divides_a_class_among_those_who_drew_it():
    seen = np.zeros(6)
    for seed in range(300):
        counts = table(FLBenchClasses(2), clients=5, seed=seed)
        assert ((counts > 0).sum(1) == 2).all()
        for label, samples in enumerate(SIZES):
            who = np.flatnonzero(counts[:, label])
            seen[label] += len(who)
            if len(who):  # more samples than twice the clients: the last takes the remainder
                share = samples // len(who)
                rest = [share] * (len(who) - 1) + [samples - share * (len(who) - 1)]
                assert counts[who, label].tolist() == rest
    # A client has a class with probability 2/6, independently of the other clients.
    assert (abs(seen - 500) < 5 * np.sqrt(1500 * 2 / 6 * 4 / 6)).all()


@pytest.mark.parametrize(("samples", "expected"), [(7, [1, 1, 1, 1, 1]), (11, [2, 2, 2, 2, 3])])
def test_flbench_leaves_large_remainders_out(samples, expected):
    """The last of five clients gets the remainder r only if what is left is below 2 (n // 5)."""
    counts = table(FLBenchClasses(1), np.zeros(samples, int), 5)
    assert counts[:, 0].tolist() == expected


# ---- fluke ---------------------------------------------------------------------------------------


def test_fluke_dirichlet_gives_every_client_the_least_of_each_class():
    counts = table(FlukeDirichlet(0.1, min_ex_class=15))
    assert counts.min() == 15 and counts.sum(0).tolist() == SIZES
    rng = np.random.default_rng(4)
    shares = rng.dirichlet([0.5] * 7, size=6)
    expected = [
        [2 + n for n in rng.multinomial(SIZES[label] - 14, shares[label])] for label in range(6)
    ]
    assert table(FlukeDirichlet(0.5), seed=4).T.tolist() == expected


def test_fluke_classes_are_all_used_and_divided_at_random():
    hits = []
    for seed in range(100):
        counts = table(FlukeClasses(2), clients=4, seed=seed)
        assert counts.sum(0).tolist() == SIZES and ((counts > 0).sum(1) <= 2).all()
        two = [label for label in range(6) if (counts[:, label] > 0).sum() == 2]
        hits += [counts[:, label].max() / SIZES[label] for label in two]
    # The larger of two binomial halves of n = 150 samples is 1/2 + sqrt(1 / (2 π n)) on average.
    assert abs(np.mean(hits) - (0.5 + np.sqrt(1 / (2 * np.pi * 150)))) < 0.005


def test_fluke_quantities_follow_the_power_law():
    sizes = table(FlukeQuantity(4.0, min_quantity=3), np.zeros(100_000, int), 5)[:, 0]
    share = ((np.arange(5) + 1) / 5) ** 4 - (np.arange(5) / 5) ** 4
    others = 100_000 - 15
    assert (abs(sizes - 3 - others * share) < 5 * np.sqrt(others * share * (1 - share))).all()


def test_fluke_s_arguments_are_checked(one_line):
    with one_line("FlukeDirichlet.min_ex_class: 50; it must be at most 1"):
        table(FlukeDirichlet(0.1, 50))
    with one_line("FlukeClasses.class_per_client: 1; it must be at least 2 with num_clients=4"):
        table(FlukeClasses(1), clients=4)
    with one_line("FlukeClasses.class_per_client: 9; it must be at most 6"):
        table(FlukeClasses(9))
    with one_line("FlukeQuantity.min_quantity: 200; it must be at most 128"):
        table(FlukeQuantity(4.0, 200))


# ---- LEAF ----------------------------------------------------------------------------------------


def test_leaf_keeps_users_with_enough_samples():
    users = np.repeat([5, 3, 8, 1], [12, 10, 9, 30])
    rule = LEAF(users)
    assert rule.count() == 3
    owned = rule.assign(np.zeros(61), 3, np.random.default_rng(0))
    assert [set(users[owned[i]].tolist()) for i in range(3)] == [{1}, {3}, {5}]
    assert owned.sizes.tolist() == [30, 10, 12]
    pairs = set()
    for seed in range(60):
        owned = rule.assign(np.zeros(61), 2, np.random.default_rng(seed))
        pairs.add(tuple(int(users[owned[i]][0]) for i in range(2)))
    assert pairs == {(1, 3), (1, 5), (3, 5)}  # each is missed with probability (2/3)^60


def test_clients_of_leaf_have_the_names_of_their_users():
    users = np.repeat(["ann", "bob", "eve", "sue"], [12, 3, 15, 11])
    x = np.arange(41)  # the number of the sample, and by it its user
    data = TensorDataModule(x, np.zeros(41), num_clients=2, partition=LEAF(users), seed=1)
    owners = [set(users[data.partition.train[i]]) for i in range(2)]
    assert [{name} for name in data.client_names] == owners


def test_leaf_refuses_what_does_not_fit(one_line):
    with one_line("num_clients: 3; it must be at most 1, the number of users with 10 samples"):
        LEAF([1] * 10 + [2] * 5).assign(np.zeros(15), 3, np.random.default_rng(0))
    with one_line("LEAF.min_samples: 10; it must be at most 5"):
        LEAF([2] * 5).count()


# ---- the table of conventions in docs/record/conventions.md ------------------------------------


CONVENTIONS = ("conventions", "flower_bridge")


def conventions():
    """The rules in the second column of the table, as they are written there."""
    text = (ROOT / "docs" / "record" / "conventions.md").read_text()
    section = text.partition("# Conventions of other projects")[2].partition("**The papers")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    return sorted({rule for row in rows for rule in re.findall(r"`([^`]*\))`", row[1])})


@pytest.mark.parametrize("written", conventions())
def test_one_line_of_yaml_gives_each_convention(written):
    rule = eval(
        written, {**{name: getattr(datamodules, name) for name in datamodules.__all__}, "K": 6}
    )
    public = {key: value for key, value in vars(rule).items() if key[0] != "_"}
    line = json.dumps({"class_path": type(rule).__name__, "init_args": public})
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Partitioner, "rule")
    found = parser.instantiate(parser.parse_string(f"rule: {line}")).rule
    assert repr(found) == repr(rule) and found.describe()


def test_the_table_of_conventions_has_every_class_of_a_convention():
    named = {rule.partition("(")[0] for rule in conventions()} | {"FlowerRule"}
    ours = [import_module(f"pfl.datamodules.rules.{name}") for name in CONVENTIONS]
    classes = {
        name
        for module in ours
        for name, kind in vars(module).items()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and name[0] != "_"
    }
    assert classes <= named
