"""Clients with networks of their own: as one network where all have it, and right elsewhere."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from pfl import FederatedLoop
from pfl.aggregation.privacy import SamplePrivacy
from pfl.algorithms import (
    FML,
    IFCA,
    FedAMP,
    FedAvg,
    FedDF,
    FedDistill,
    FedGH,
    FedMRL,
    FedPer,
    FedProto,
    FedRolex,
    FedTGP,
    HeteroFL,
    LGFedAvg,
    LocalTrain,
    pFedHN,
)
from pfl.callbacks import LocalBaseline
from pfl.datamodules import DigitsDataModule, Dirichlet
from pfl.method.exported import client_network, finetuned_network
from pfl.method.nested import nested_places
from pfl.models import MLP, Family
from pfl.models.classifier import head_name
from pfl.parameters import ParameterSpace
from pfl.scores.neighbours import Neighbours
from pfl.stages.private import GRADIENTS
from tests.algorithms.methods import (
    BATCHES,
    METHODS,
    differing,
    everything,
    small_network,
    small_world,
)
from tests.families import drawn
from tests.problems import quiet
from tests.refusal import refused

# Every way in which messages and states travel: dense, masked, kept, in rows, sent first, to each.
COPIED = ["FedAvg", "LocalTrain", "FedPer", "LGFedAvg", "Ditto", "SCAFFOLD", "FedPD", "FedAMP"]
COPIED += ["FedACS", "FedSLR", "IFCA", "CFL", "pFedHN", "FedProto", "FedGH", "FedPAC", "FedBuff"]
COPIED += ["FML", "FedKD", "FedMRL", "FedMD", "FedDF", "FedGen", "FedDistill", "FedTGP"]
COPIED += ["FedFomo"]


DISTILLING = partial(FedDF, public=DigitsDataModule(num_clients=1), server_steps=3)
SMALL = dict(lr=0.05, batch_size=20, engine="sequential")


def run(root, method, loop, rounds=3, *callbacks):
    trainer = quiet(root, rounds, *callbacks, precision="64-true")
    trainer.fit(method, datamodule=loop)
    return method


def three(features=None, **kw):
    """Three networks for the digits, the widest one first, with the same first values each time."""
    torch.manual_seed(3)
    sizes = {"large": (16, 12), "middle": (16, 6), "small": (16, 4)}
    return Family(
        {name: MLP(64, hidden) for name, hidden in sizes.items()}, features=features, **kw
    )


def digits(**kw):
    data = DigitsDataModule(num_clients=7, partition=Dirichlet(0.5))
    return FederatedLoop(data, **{"clients_per_round": 5, **kw})


# ---- one network for all is what it was ----------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in METHODS if name.split(",")[0] in COPIED])
def test_three_copies_of_a_network_equal_the_network(tmp_path, name):
    """Bit for bit: models, states, kept messages and bytes; scores up to the order of sums."""
    method = METHODS[name]
    found = []
    for network in (small_network(), Family({key: small_network() for key in "abc"})):
        algorithm = method.make(network, engine="sequential", **BATCHES)
        count = None if method.everyone else 3
        loop = FederatedLoop(small_world(classes=method.classes), clients_per_round=count)
        found.append(everything(run(tmp_path, algorithm, loop)))
    plain, family = found
    family = {key: value for key, value in family.items() if not key.startswith("module members.")}
    more = family.keys() - plain.keys()
    if name == "FedDF":  # with a family each client is scored with the model of its network, too
        assert more and all("personalized" in key for key in more)
        family = {key: family[key] for key in plain}
    assert plain.keys() == family.keys()
    rows = {key for key in plain if key.startswith("row ")}
    assert differing(plain, family) <= rows
    for key in rows:
        torch.testing.assert_close(plain[key], family[key], rtol=0, atol=1e-12, equal_nan=True)


# ---- networks that differ ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FedProto, LGFedAvg, LocalTrain, FedGH])
def test_the_order_of_the_networks_does_not_matter(tmp_path, kind):
    """But for the server's head, which begins as the first network's."""
    names = ["large", "middle", "small"]
    owners = {str(client): names[client % 3] for client in range(7)}
    found = []
    for order in (names, names[::-1]):
        family = three(features=4, clients=owners)
        family.networks = {name: family.networks[name] for name in order}
        if kind in (LGFedAvg, FedGH):  # a common head to begin with
            heads = [network.head for network in family.networks.values()]
            for head in heads:
                nn.init.constant_(head.weight, 0.1)
                nn.init.zeros_(head.bias)
        method = run(tmp_path, kind(family, lr=0.05, engine="sequential"), digits())
        found.append(everything(method))
    assert differing(*map(_comparable, found)) == set()


def _comparable(values):
    """All but models, whose places in the module depend on the order; without the padding."""
    kept = ("client ", "seen ", "ledger ", "samples_seen", "bytes")
    rows = {key: value for key, value in values.items() if key.startswith(kept)}
    return {key: v[:, v.any(0)] if v.dim() == 2 else v for key, v in rows.items()}


def test_fedproto_on_three_networks_equals_single_clients_by_hand(tmp_path):
    """A round of FedProto: local steps of each client's own network, then means over classes."""
    family = three(features=4)
    method = FedProto(family, lr=0.1, batch_size=None, penalty=0.0, engine="sequential")
    method = run(tmp_path, method, digits(clients_per_round=None), rounds=1)
    names = list(family.networks)
    data = method.run.loop.datamodule
    sums = torch.zeros(10, 4, dtype=torch.float64)
    counts = torch.zeros(10, dtype=torch.float64)
    for client in range(7):
        network = three(features=4).networks[names[client % 3]].double()
        index = torch.from_numpy(data.partition.train[client])
        x, y = data.samples.gather(index)
        loss = nn.functional.cross_entropy(network(x.double()), y)
        loss.backward()
        with torch.no_grad():
            for p in network.parameters():
                p -= 0.1 * p.grad
            z = network.body(x.double())
        own = nn.utils.parameters_to_vector(network.parameters())
        row = method.client_rows("w", np.array([client]))[0]
        torch.testing.assert_close(row[: len(own)], own.detach(), rtol=0, atol=1e-13)
        assert not row[len(own) :].any()
        sums.index_add_(0, y, z)
        counts += torch.bincount(y, minlength=10)
    known = counts > 0
    expected = sums[known] / counts[known, None]
    torch.testing.assert_close(method.prototypes[known, 1:], expected, rtol=0, atol=1e-13)


# ---- parts of a wide network ---------------------------------------------------------------------

PAIRS = {
    "MLP": (lambda: MLP(64, (8, 6)), lambda: MLP(64, (3, 5))),
    "convolutions, then flat features": (
        lambda: nn.Sequential(
            *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3)),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(80, 7), nn.ReLU(), nn.Linear(7, 10)),
        ),
        lambda: nn.Sequential(
            *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 3)),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(48, 4), nn.ReLU(), nn.Linear(4, 10)),
        ),
    ),
}


@pytest.mark.parametrize("shift", [0, 1, 5, 23])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_part_alone_in_the_wide_network_gives_what_the_narrow_one_gives(pair, shift):
    """All other values are 0, so that other units give 0 and nothing comes of them."""
    make_wide, make_narrow = PAIRS[pair]
    wide, narrow = make_wide().double(), make_narrow().double()
    spaces = [ParameterSpace(network) for network in (wide, narrow)]
    places = nested_places(spaces[0].layers, spaces[1].layers, shift)
    assert len(places.unique()) == spaces[1].size
    with torch.no_grad():
        spaces[0].vector.zero_()
        spaces[0].vector[places] = spaces[1].vector
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 64)))
    torch.testing.assert_close(wide(x), narrow(x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", [HeteroFL, FedRolex])
def test_a_round_is_a_mean_of_each_value_over_the_clients_that_have_it(tmp_path, kind):
    """Two rounds with one full step a client, against autograd and a loop over units."""
    family = three()
    start = {name: network.double() for name, network in three().networks.items()}
    server = [p.detach().clone() for p in start["large"].parameters()]
    shapes = {n: [tuple(p.shape) for p in start[n].parameters()] for n in start}
    given = {"lr": 0.1, "batch_size": None, "mask_classes": False, "engine": "sequential"}
    method = run(tmp_path, kind(family, **given), digits(clients_per_round=None), rounds=2)
    data = method.run.loop.datamodule
    names = list(start)
    for number in range(2):
        shift = number if kind is FedRolex else 0
        total = [torch.zeros_like(p) for p in server]
        count = [torch.zeros_like(p) for p in server]
        for client in range(7):
            name = names[client % 3]
            units = [
                [(shift + u) % S if s < S else u for u in range(s)]
                for s, S in zip(
                    *([shape[0] for shape in shapes[n]] for n in (name, "large")), strict=True
                )
            ]
            network = start[name]
            cuts = []
            inputs = list(range(64))
            for place, (p, whole) in enumerate(zip(network.parameters(), server, strict=True)):
                if p.dim() == 2:
                    cut = np.ix_(units[place], inputs)
                    inputs = units[place]
                else:
                    cut = units[place]
                cuts.append(cut)
                p.data = whole[cut].clone()
                p.grad = None
            x, y = data.samples.gather(torch.from_numpy(data.partition.train[client]))
            nn.functional.cross_entropy(network(x.double()), y).backward()
            for place, (p, cut) in enumerate(zip(network.parameters(), cuts, strict=True)):
                total[place][cut] += (p - 0.1 * p.grad).detach()
                count[place][cut] += 1
        server = [
            torch.where(c > 0, t / c.clamp_min(1), w)
            for t, c, w in zip(total, count, server, strict=True)
        ]
    expected = nn.utils.parameters_to_vector(server)
    torch.testing.assert_close(method.global_model, expected, rtol=0, atol=1e-13)
    sizes = [sum(map(np.prod, shapes[names[client % 3]])) for client in range(7)]
    assert method.progress.ledger.uplink.tolist() == [8 * 2 * int(size) for size in sizes]
    assert method.progress.ledger.downlink.tolist() == method.progress.ledger.uplink.tolist()


def test_classes_that_a_client_lacks_have_the_score_zero(tmp_path):
    """One full step on two of ten classes, against autograd."""
    torch.manual_seed(0)
    network = MLP(64, (4,))
    first = nn.utils.parameters_to_vector(network.parameters()).detach().double().clone()
    method = HeteroFL(network, lr=0.1, batch_size=None, engine="sequential")
    method = run(tmp_path, method, digits(clients_per_round=1), rounds=1)
    client = int(method.participant_ids[0])
    data = method.run.loop.datamodule
    x, y = data.samples.gather(torch.from_numpy(data.partition.train[client]))
    plain = MLP(64, (4,)).double()
    nn.utils.vector_to_parameters(first, plain.parameters())
    has = torch.zeros(10, dtype=torch.float64)
    has[y.unique()] = 1
    nn.functional.cross_entropy(plain(x.double()) * has, y).backward()
    expected = [p - 0.1 * p.grad for p in plain.parameters()]
    expected = nn.utils.parameters_to_vector(expected).detach()
    torch.testing.assert_close(method.global_model, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", [HeteroFL, FedRolex])
def test_with_one_network_they_are_fedavg_with_plain_means(tmp_path, kind):
    given = {"lr": 0.1, "weighting": "uniform", "engine": "sequential"}
    torch.manual_seed(1)
    network = MLP(64, (5,))
    one = run(tmp_path, kind(network, mask_classes=False, **given), digits())
    torch.manual_seed(1)
    other = run(tmp_path, FedAvg(MLP(64, (5,)), **given), digits())
    torch.testing.assert_close(one.global_model, other.global_model, rtol=0, atol=1e-13)


# ---- networks drawn at random --------------------------------------------------------------------

FITTING = [FedProto, FedTGP, FedDistill, FedGH, LGFedAvg, LocalTrain]


@pytest.mark.parametrize(("seed", "kind"), list(enumerate(FITTING)))
def test_a_client_of_a_drawn_family_has_what_it_has_among_its_kind(tmp_path, seed, kind):
    """Each client's model after its first round is that of a run with its network for all: what
    the others have comes with the second round."""
    names = list(drawn(seed).networks)
    method = run(tmp_path, kind(drawn(seed), **SMALL), digits(clients_per_round=None), rounds=1)
    for number, name in enumerate(names):
        network = drawn(seed).networks[name]
        server = drawn(seed).networks[names[0]]
        if kind in (LGFedAvg, FedGH):  # the common head is that of the first network
            network.get_submodule(head_name(network)).load_state_dict(
                server.get_submodule(head_name(server)).state_dict()
            )
        alone = run(tmp_path, kind(network, **SMALL), digits(clients_per_round=None), rounds=1)
        for client in range(number, 7, len(names)):
            own, expected = (client_network(one, client) for one in (method, alone))
            shared = () if kind not in (LGFedAvg, FedGH) else head_name(network)
            for key, value in own.state_dict().items():
                if not shared or not key.startswith(shared):
                    torch.testing.assert_close(
                        value, expected.state_dict()[key], rtol=0, atol=1e-12, msg=f"{name} {key}"
                    )


@pytest.mark.parametrize("kind", [FedTGP, FedDistill])
def test_a_drawn_family_learns(tmp_path, kind):
    """Every network of it: each client's loss on its own samples falls."""
    settings = SMALL | {"lr": 0.05, "local_epochs": 2}
    method = run(tmp_path, kind(drawn(7), **settings), digits(clients_per_round=None), rounds=4)
    data = method.run.loop.datamodule
    names = list(drawn(7).networks)
    for client in range(7):
        x, y = data.samples.gather(torch.from_numpy(data.partition.train[client]))
        first = drawn(7).networks[names[client % len(names)]].double().eval()
        with torch.no_grad():
            before, after = (
                float(nn.functional.cross_entropy(network(x.double()), y))
                for network in (first, client_network(method, client))
            )
        assert after < before


def test_a_drawn_family_runs_in_any_order_and_resumes(tmp_path):
    """Chunks of one and of seven clients, threads and a stop after a round change no bit."""
    made = []
    for number, at_once in enumerate((1, 7, None)):
        loop = digits(clients_at_once=at_once, dropout=0.2)
        made.append(run(tmp_path / str(number), FedProto(drawn(4), **SMALL), loop, rounds=2))
    early = quiet(tmp_path / "parts", 1, precision="64-true")
    early.fit(FedProto(drawn(4), **SMALL), datamodule=digits(dropout=0.2))
    later = FedProto(drawn(4), **SMALL)
    last = early.run_dir / "checkpoints" / "last.ckpt"
    trainer = quiet(tmp_path / "parts", 2, precision="64-true")
    trainer.fit(later, datamodule=digits(dropout=0.2), ckpt_path=last)
    one, *others = map(everything, [*made, later])
    for other in others:
        assert {key for key in differing(one, other) if not key.startswith("row ")} == set()


def families_with_messengers(kind, seed, **kw):
    """A method on a drawn family; FML and FedMRL have a small messenger."""
    settings = SMALL | kw
    if kind in (FML, FedMRL):
        torch.manual_seed(seed)
        settings["messenger"] = MLP(64, (4,))
    return kind(drawn(seed), **settings)


@pytest.mark.parametrize(("seed", "kind"), [(11, FedProto), (12, FML), (13, FedMRL), (14, FML)])
def test_engines_agree_on_a_drawn_family(tmp_path, seed, kind):
    found = []
    for engine in ("sequential", "auto"):
        method = families_with_messengers(kind, seed, engine=engine)
        found.append(everything(run(tmp_path / engine, method, digits(), rounds=2)))
    one, other = found
    states = [key for key in one if key.startswith("client ")]
    assert states
    for key in states:
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=1e-10, msg=key)


@pytest.mark.parametrize("kind", [FML, FedMRL])
def test_a_drawn_family_with_a_messenger_resumes(tmp_path, kind):
    """Bit for bit, and with other networks to begin with."""

    def begin(root, rounds, seed, ckpt_path=None):
        method = families_with_messengers(kind, 15)
        torch.manual_seed(seed)
        for p in method.network.parameters():
            p.data.add_(0.01 * torch.randn_like(p))
        trainer = quiet(tmp_path / root, rounds, precision="64-true")
        trainer.fit(method, datamodule=digits(), ckpt_path=ckpt_path)
        return method

    whole = begin("whole", 3, 0)
    early = begin("parts", 1, 0)
    last = early.trainer.run_dir / "checkpoints" / "last.ckpt"
    resumed = begin("parts", 3, 1, last)
    one, other = everything(whole), everything(resumed)
    assert {key for key in differing(one, other) if not key.startswith("row ")} == set()


def test_the_local_baseline_of_a_drawn_family_is_local_training(tmp_path):
    """Each client's own network alone; BatchNorm is among them."""
    baseline = LocalBaseline()
    run(tmp_path / "run", FedProto(drawn(3), **SMALL), digits(), 2, baseline)
    alone = run(tmp_path / "alone", LocalTrain(drawn(3), **SMALL), digits(), rounds=2)
    for name, values in alone.evaluation.scores["test", "personalized"].items():
        np.testing.assert_array_equal(baseline.scores[name], values, err_msg=name)


# ---- running statistics, local memories, private samples -----------------------------------------


def test_statistics_stay_with_the_clients_of_a_network_that_has_some(tmp_path):
    """Two full steps, against PyTorch: means and variances are those of the network alone."""
    family = drawn(0)
    method = LocalTrain(family, lr=0.1, batch_size=None, local_epochs=2, engine="sequential")
    method = run(tmp_path, method, digits(clients_per_round=None), rounds=1)
    names = list(family.networks)
    data = method.run.loop.datamodule
    for client in range(7):
        network = drawn(0).networks[names[client % len(names)]].double().train()
        x, y = data.samples.gather(torch.from_numpy(data.partition.train[client]))
        for _ in range(2):
            network.zero_grad()
            nn.functional.cross_entropy(network(x.double()), y).backward()
            with torch.no_grad():
                for p in network.parameters():
                    p -= 0.1 * p.grad
        found = client_network(method, client).state_dict()
        for key, value in network.state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-12, msg=key)


def test_neighbours_vote_in_the_features_of_each_clients_network(tmp_path):
    """The scores of each client are those of a run in which all have its network."""
    given = dict(lr=0.05, engine="sequential")
    data = lambda: FederatedLoop(  # noqa: E731
        DigitsDataModule(num_clients=6, partition=Dirichlet(5.0)), neighbours=Neighbours(k=5)
    )
    method = run(tmp_path, LocalTrain(three(), **given), data(), rounds=1)
    scores = method.evaluation.scores["test", "knn"]["accuracy"]
    for number, network in enumerate(three().networks.values()):
        alone = run(tmp_path, LocalTrain(network, **given), data(), rounds=1)
        expected = alone.evaluation.scores["test", "knn"]["accuracy"]
        np.testing.assert_allclose(scores[number::3], expected[number::3], rtol=0, atol=1e-12)


def test_private_gradients_of_each_network(tmp_path):
    """Noise and mini-batches are functions of client and step: a client's model is that of a run in
    which all have its network, and its gradients are counted."""
    given = dict(lr=0.05, engine="sequential", batch_size=8)
    private = lambda: digits(  # noqa: E731
        sample_privacy=SamplePrivacy(1.0, 1.0, reproducible=True), clients_per_round=None
    )
    method = run(tmp_path, LocalTrain(three(), **given), private(), rounds=2)
    everyone = np.arange(7)
    for number, network in enumerate(three().networks.values()):
        alone = run(tmp_path, LocalTrain(network, **given), private(), rounds=2)
        for name in alone.states.declared:
            own = alone.client_rows(name, everyone)[number::3]
            found = method.client_rows(name, everyone)[number::3, : own.shape[1]]
            torch.testing.assert_close(found, own, rtol=0, atol=1e-12)
    assert (method.client_rows(GRADIENTS, everyone) > 0).all()


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FedProto, HeteroFL, LGFedAvg, DISTILLING])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, kind):
    """It resumes with other first networks."""

    def begin(root, rounds, seed, ckpt_path=None):
        family = three(features=None if kind is HeteroFL else 4)
        torch.manual_seed(seed)
        for network in family.networks.values():
            for p in network.parameters():
                nn.init.normal_(p, std=0.1)
        method = kind(family, lr=0.05)
        trainer = quiet(root, rounds, precision="64-true")
        loop = digits(dropout=0.3, unseen=0.2)
        trainer.fit(method, datamodule=loop, ckpt_path=ckpt_path)
        return method

    expected = begin(tmp_path / "whole", 4, 0)
    early = begin(tmp_path / "parts", 2, 0)
    last = early.trainer.run_dir / "checkpoints" / "last.ckpt"
    actual = begin(tmp_path / "parts", 4, 5, last)
    assert differing(everything(actual), everything(expected)) == set()
    for file in ("metrics.csv", "clients.csv"):
        one, other = ((m.trainer.run_dir / file).read_bytes() for m in (actual, expected))
        assert one == other


@pytest.mark.parametrize("engine", ["auto", "vmap", "debug"])
@pytest.mark.parametrize("kind", [FedProto, FedRolex, DISTILLING])
def test_engines_and_chunks_give_the_same(tmp_path, kind, engine):
    features = None if kind is FedRolex else 4
    one = run(tmp_path, kind(three(features), lr=0.05, engine="sequential"), digits())
    other = kind(three(features), lr=0.05, engine=engine)
    other = run(tmp_path, other, digits(clients_at_once=2))
    everyone = np.arange(7)
    for name in one.states.store.names:
        rows = [method.client_rows(name, everyone) for method in (one, other)]
        torch.testing.assert_close(*rows, rtol=0, atol=1e-10)
    torch.testing.assert_close(one.global_model, other.global_model, rtol=0, atol=1e-10)
    for first, second in zip(one.members, other.members, strict=True):  # FedDF has one of each
        torch.testing.assert_close(first.global_model, second.global_model, rtol=0, atol=1e-10)


def test_an_exported_client_has_its_own_network(tmp_path):
    method = run(tmp_path, FedProto(three(4), lr=0.05), digits())
    for client, name in enumerate(["large", "middle", "small"]):
        network = client_network(method, client)
        own = nn.utils.parameters_to_vector(network.parameters())
        assert len(own) == ParameterSpace(three(4).networks[name]).size
        row = method.client_rows("w", np.array([client]))[0]
        torch.testing.assert_close(own, row[: len(own)], rtol=0, atol=0)


def test_a_finetuned_client_has_its_own_network(tmp_path):
    """After one full step, against autograd on the network that the client exports."""
    given = {"lr": 0.05, "penalty": 0.0, "batch_size": None, "engine": "sequential"}
    method = run(tmp_path, FedProto(three(4), **given), digits())
    data = method.run.loop.datamodule
    for client in range(3):
        network = client_network(method, client)
        x, y = data.samples.gather(torch.from_numpy(data.partition.train[client]))
        nn.functional.cross_entropy(network(x.double()), y).backward()
        expected = [p - 0.05 * p.grad for p in network.parameters()]
        expected = nn.utils.parameters_to_vector(expected).detach()
        found = finetuned_network(method, client, steps=1).parameters()
        found = nn.utils.parameters_to_vector(found)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_predictions_are_those_of_each_clients_network(tmp_path):
    method = run(tmp_path, FedProto(three(4), lr=0.05), digits())
    trainer = quiet(tmp_path, 1, precision="64-true")
    loop = method.run.loop
    parts = trainer.predict(method, datamodule=loop)
    client = np.concatenate([part["client"] for part in parts])
    sample = np.concatenate([part["sample"] for part in parts])
    label = np.concatenate([part["personalized"] for part in parts])
    for number in range(7):
        rows = client == number
        x, _ = loop.datamodule.samples.gather(torch.from_numpy(sample[rows]))
        expected = client_network(method, number)(x.double()).argmax(1)
        assert label[rows].tolist() == expected.tolist()


@pytest.mark.parametrize("kind", [HeteroFL, DISTILLING])
def test_predictions_of_the_servers_models_are_those_that_are_scored(tmp_path, kind):
    """Clients in one chunk have several networks, and each has received its own model."""
    method = run(tmp_path, kind(three(), lr=0.1), digits())
    loop = method.run.loop
    trainer = quiet(tmp_path, 1, precision="64-true")
    parts = trainer.predict(method, datamodule=loop)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for name in ("global", "personalized"):
        right = columns[name] == columns["target"]
        scores = [right[columns["client"] == number].mean() for number in range(7)]
        assert method.row[f"test/{name}/accuracy"] == pytest.approx(np.mean(scores))


def test_a_newcomer_begins_with_its_networks_first_values(tmp_path):
    method = run(tmp_path, FedProto(three(4), lr=0.05), digits(unseen=0.3))
    names = ["large", "middle", "small"]
    for client in method.unseen_clients.tolist():
        own = nn.utils.parameters_to_vector(client_network(method, client).parameters())
        first = nn.utils.parameters_to_vector(three(4).networks[names[client % 3]].parameters())
        torch.testing.assert_close(own, first.detach().double(), rtol=0, atol=0)
    assert any(name.startswith("test/unseen") for name in method.row)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (FedAvg, "FedAvg sends a message 'w' whose values are other ones in each; take FedProto"),
        (FedPer, "FedPer shares a part of the model that has the shapes"),
        (IFCA, "IFCA sends a message 'models' whose values are other ones in each"),
        (FedAMP, "FedAMP keeps a message 'w' of every client at the server"),
        (pFedHN, "pFedHN sends a message 'w' whose values are other ones in each"),
    ],
)
def test_whole_models_of_other_networks_are_refused(tmp_path, kind, says):
    with refused(says):
        run(tmp_path, kind(three()), digits())


def test_prototypes_of_other_widths_are_refused(tmp_path):
    with refused("FedProto sends a message 'prototypes' whose values are other ones in each"):
        run(tmp_path, FedProto(three()), digits())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"clients": {"0": "large"}}, "names no network for client '1', one of 6"),
        ({"clients": "none.yaml"}, "'none.yaml' is neither 'turn' or 'size' nor a file"),
        ({"clients": dict.fromkeys("0123456", "huge")}, "'huge', which is none of the networks"),
    ],
)
def test_who_has_which_is_checked_before_training(tmp_path, change, says):
    with refused(says):
        run(tmp_path, FedProto(three(4, **change)), digits())


def test_what_a_family_cannot_have_is_refused(tmp_path):
    batch_norm = Family(
        {key: nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 10)) for key in "ab"}
    )
    with refused("the network 'a' has running statistics, and FedAvg has a global model"):
        run(tmp_path, FedAvg(batch_norm), digits())
    with refused("is no part of"):
        run(tmp_path, HeteroFL(Family({"a": MLP(64, (4,)), "b": MLP(64, (8,))})), digits())
