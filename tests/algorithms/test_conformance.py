"""What every method must do: these tests run for each entry of tests/algorithms/methods.py."""

import dataclasses
import inspect
import io

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

import pfl.algorithms
from models import Delta, LoRA
from pfl.algorithms import GPGD, LPGD, FederatedAlgorithm, FedPer, FedSLR, LocalTrain
from pfl.communication import Message
from pfl.method.messenger import Joined
from pfl.method.transport import Compared, Pooled
from tests.algorithms import closed_forms as forms
from tests.algorithms.methods import (
    BATCHES,
    EVERY_METHOD,
    EVERY_VARIANT,
    METHODS,
    SIZES,
    differing,
    everything,
    learned,
    small_network,
    small_world,
    tables,
)

PERSONAL = {name: method for name, method in METHODS.items() if method.private}
LIMITED = {name: method for name, method in METHODS.items() if method.limit is not None}
COUNTLESS = {name: m for name, m in METHODS.items() if m.counts_matter != "always"}
EVERYONE = range(len(SIZES))
# Clients of these have read some values before, could work them out, or are sent factors of them.
FREE = {
    *("FedBABU", "FedPD, skipping", "FedSLR", "FedSLR, all multipliers", "GPGD", "GlobalTrain"),
    "LocalTrain",
}
FULL = dict(lr=0.2, local_epochs=2, batch_size=None)


def test_every_class_is_listed():
    exported = {
        kind
        for kind in vars(pfl.algorithms).values()
        if inspect.isclass(kind) and issubclass(kind, FederatedAlgorithm)
    }
    listed = {base for method in METHODS.values() for base in method.kind.__mro__}
    assert exported <= listed


@pytest.fixture
def train(fit):
    """Trains a method on the small world, two clients a round if it can; the algorithm."""

    def train(method, rounds=3, *, settings=BATCHES, data=None, network=None, **loop):
        algorithm = method.make(network or small_network(), **settings)
        algorithm.refuse_all_reads()  # in every engine
        if not method.everyone and "trace" not in loop:
            loop = {"clients_per_round": 2, **loop}
        data = data or small_world(classes=method.classes)
        return fit(algorithm, data, rounds, **{"evaluate": (), **loop})

    return train


def models(algorithm):
    """The global model [P] and the personalized ones [M, P]; None for what a method has not."""
    w, w_i = algorithm.global_model.numpy(), None
    if algorithm.has_personalized:
        w_i = np.full((algorithm.store.num_clients, len(w)), np.nan)
        for clients in algorithm.iter_clients("train"):
            w_i[clients.ids] = algorithm.personalized(clients).numpy()
    return w if algorithm.has_global else None, w_i


def given(network):
    """What stands for the network that the method was given, where that adds layers to it."""
    if isinstance(network, Joined):
        network = network.own
    return network if isinstance(network, nn.Sequential) else network.body


class Snapshots(pl.Callback):
    """`everything` after each round."""

    def __init__(self):
        self.rounds = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.rounds.append(everything(pl_module))


class Wire(pl.Callback):
    """Records every client's exchange with the server, in order."""

    def __init__(self):
        self.exchanges, self.evaluated = [], [0]

    def on_train_start(self, trainer, pl_module):
        update, personalized = pl_module.client_update, pl_module.personalized

        def read(clients, row):
            own = clients.personal_messages
            rows = [v[row] if name in own else v for name, v in clients.received.items()]
            return sum(int(values.count_nonzero()) for values in rows)

        def recorded(clients, w):
            sent = update(clients, w)
            sent = sent if isinstance(sent, dict) else {"w": sent}
            values = {k: m.values if isinstance(m, Message) else m for k, m in sent.items()}
            for row, client in enumerate(clients.ids.tolist()):
                self.exchanges.append(
                    forms.Exchange(
                        pl_module,
                        clients.round,
                        client,
                        (w[row] if w.dim() == 2 else w).numpy().copy(),
                        {name: value[row].numpy().copy() for name, value in values.items()},
                        {name: value[row].numpy().copy() for name, value in clients.state.items()},
                        read(clients, row),
                    )
                )
            return sent

        def evaluated(clients):
            self.evaluated += [read(clients, row) for row in range(len(clients))]
            return personalized(clients)

        pl_module.client_update, pl_module.personalized = recorded, evaluated


# ---- where it ends ------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [4, 1], ids=["four clients", "one client"])
@pytest.mark.parametrize("method", LIMITED.values(), ids=LIMITED)
def test_the_limit_on_quadratics(fit, method, clients):
    """With full gradients a method ends where its closed form says; with one client as well."""
    q = method.problem(clients)
    arguments = dict(batch_size=None, loss=q.loss, **method.settle)
    algorithm = method.make(q.problem.network(0.3), **arguments)
    fit(algorithm, q.problem, method.rounds)
    expected = method.limit(q, **{**method.arguments, **method.settle})
    for actual, model in zip(models(algorithm), expected, strict=True):
        assert (actual is None) == (model is None)
        if model is not None:
            np.testing.assert_allclose(actual, model, rtol=0, atol=method.accuracy)
            assert np.abs(model - 0.3).max() > 0.1  # not where it began


# ---- what must not matter -----------------------------------------------------------------------


@EVERY_METHOD
def test_a_seed_gives_one_result(train, method):
    """The same bits for the same seed, whatever states the global generators are in."""
    runs = []
    for seed, state in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(state)
        np.random.seed(state)
        algorithm = train(method, seed=seed)
        runs.append((everything(algorithm), tables(algorithm)))
    assert differing(runs[1][0], runs[0][0]) == set()
    assert runs[1][1] == runs[0][1]
    assert learned(differing(runs[2][0], runs[0][0]))  # the seed does decide


@EVERY_VARIANT
def test_engines_and_chunks_agree(train, method):
    """In float64 the order of sums is all that may differ from one client after another in the
    plain loop: 1e-10 leaves no room for a masked row that moves, or a client in a wrong row."""

    def result(engine, at_once):
        loop = {} if method.everyone else {"clients_per_round": 3}
        loop = {"clients_at_once": at_once, "evaluate": ("test",), **loop}
        settings = BATCHES | dict(engine=engine)
        algorithm = train(method, settings=settings, **loop)
        assert algorithm.oracle.engine.batched == (engine == "vmap")
        rows = {
            f"table {name}": torch.from_numpy(
                np.loadtxt(io.StringIO(text), delimiter=",", skiprows=1)
            )
            for name, text in tables(algorithm).items()
        }
        return everything(algorithm) | rows

    expected = result("sequential", 1)
    for engine, at_once in (("sequential", 3), ("vmap", 1), ("vmap", 2)):
        actual = result(engine, at_once)
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                actual[name], value, rtol=0, atol=1e-10, equal_nan=True, msg=f"{name} {engine}"
            )


@EVERY_METHOD
def test_clients_of_a_group_do_not_depend_on_each_other(train, method):
    """The engine debug compares clients that train together and alone; so do their bytes agree."""
    everyone = {} if method.everyone else {"clients_per_round": 3}
    algorithm = train(method, 2, settings=BATCHES | dict(engine="debug"), **everyone)
    assert isinstance(algorithm.transport, Pooled if method.pooled else Compared)
    assert method.pooled or algorithm.transport.compared


@pytest.mark.parametrize("method", COUNTLESS.values(), ids=COUNTLESS)
def test_a_client_with_one_sample(train, method):
    """Every sample three times gives the same objectives and weights, so with full gradients the
    same models: a client's single sample counts as it should. A method that mixes models by the
    numbers of their samples has mixed none in its first round."""
    assert 1 in SIZES
    rounds = 3 if method.counts_matter is None else 1
    once, thrice = (
        train(
            method,
            rounds,
            settings=FULL,
            data=small_world(copies, classes=method.classes),
            trace=[EVERYONE] * rounds,
        )
        for copies in (1, 3)
    )
    for one, three in zip(models(once), models(thrice), strict=True):
        if one is not None:
            np.testing.assert_allclose(three, one, rtol=0, atol=1e-10)


@EVERY_METHOD
def test_a_round_in_which_nobody_reports(train, method):
    """It changes nothing, also where it is the first one. Full gradients do not know the number of
    the round, so that what follows is what would have come without the empty rounds."""
    some, others = (EVERYONE, EVERYONE) if method.everyone else ([0, 2], [1, 2])
    actual, expected = Snapshots(), Snapshots()
    train(method, 4, settings=FULL, trace=[[], some, [], others], callbacks=[actual])
    train(method, 2, settings=FULL, trace=[some, others], callbacks=[expected])
    for name, value in method.make(small_network()).state_dict().items():
        if name.startswith("network."):
            assert torch.equal(actual.rounds[0][f"module {name}"], value)
    changed = differing(actual.rounds[2], actual.rounds[1])
    assert {name for name in changed if not name.startswith("row ")} == {"rounds", "steps"}
    assert learned(differing(actual.rounds[3], actual.rounds[2]))
    for number, reported in enumerate((1, 3)):
        for name in learned(expected.rounds[number]):
            if not method.timed:
                torch.testing.assert_close(
                    actual.rounds[reported][name],
                    expected.rounds[number][name],
                    rtol=0,
                    atol=1e-12,
                    equal_nan=True,
                    msg=f"{name}, round {reported}",
                )


@EVERY_METHOD
def test_double_precision_stays(train, method):
    """No state and no message is in single precision, nor has gone through it."""
    wire = Wire()
    actual = everything(train(method, settings=BATCHES, callbacks=[wire]))
    whole = {f"{kind} {name}" for kind in ("client", "module") for name in method.whole}
    for name in learned(actual) - whole:
        value = actual[name]
        assert value.dtype != torch.float32, name
        known = value[value.isfinite()]
        if value.is_floating_point() and value.ndim and known.any():
            assert not torch.equal(known, known.float().double()), name
    for exchange in wire.exchanges:
        arrays = [exchange.received, *exchange.sent.values(), *exchange.state.values()]
        assert {array.dtype for array in arrays} == {np.dtype(np.float64)}


@EVERY_METHOD
def test_a_frozen_parameter_never_moves(train, method):
    """Neither with the server nor with a client, nor is it sent."""
    network, wire, snapshots = small_network(), Wire(), Snapshots()
    network[0].weight.requires_grad_(False)
    before, start = network[0].weight.clone(), method.make(network).global_model.numpy().copy()
    loop = dict(trace=[EVERYONE] * 3, callbacks=[wire, snapshots])
    algorithm = train(method, network=network, **loop)
    for owner in (algorithm.network, algorithm.oracle.runner.network):
        assert torch.equal(given(owner)[0].weight, before)
    if algorithm.wrapper is None and not isinstance(algorithm.network, Joined):
        assert algorithm.space.size == 4 + 8 + 2
    assert {len(exchange.received) for exchange in wire.exchanges} <= {algorithm.space.size, 0}
    assert_booked(method, wire, snapshots)
    moving = ~algorithm.space.mask(method.still).numpy()
    for model in models(algorithm):
        assert model is None or not np.isclose(model, start)[..., moving].any()


class Handwritten(nn.Module):
    """W x + b with a fixed W, plus 1.5 B A x or D x, with the names of `LoRA` and of `Delta`."""

    def __init__(self, base, **adapters):
        super().__init__()
        self.register_buffer("W", base.weight.detach().clone())
        self.register_buffer("b", base.bias.detach().clone())
        for name, values in adapters.items():
            setattr(self, name, nn.Parameter(values.detach().clone()))
        self.dense = "delta" in adapters

    def forward(self, x):
        update = self.delta if self.dense else 1.5 * self.lora_B @ self.lora_A
        return x @ (self.W + update).T + self.b


ON_ADAPTERS = {
    name: method
    for name, method in METHODS.items()
    if method.kind.__name__ != "OnFactors"  # these entries have LoRA in all tests
}


@pytest.mark.parametrize("method", ON_ADAPTERS.values(), ids=ON_ADAPTERS)
def test_adapters_are_trained_as_any_parameters(train, method):
    """With `trainable` a method has the models, states and bytes that it has on a network whose
    adapter is written by hand, here in the plain engine; and W stays."""
    dense = method.kind in (FedSLR, LPGD, GPGD)  # which refuse factors
    what = Delta(["0"]) if dense else LoRA(2, 3.0, ["0"])
    torch.manual_seed(0)
    copied = small_network()
    what.apply(copied)
    adapters = dict(copied[0].named_parameters(recurse=False))
    by_hand = small_network()
    by_hand[0] = Handwritten(by_hand[0], **adapters)
    torch.manual_seed(0)  # A is drawn
    actual = train(method, 2, settings=BATCHES | dict(trainable=what))
    expected = train(method, 2, settings=BATCHES | dict(engine="sequential"), network=by_hand)
    assert torch.equal(given(actual.network)[0].base.weight, by_hand[0].W)
    if actual.wrapper is None:
        assert actual.space.size == expected.space.size
    for one, other in zip(models(actual), models(expected), strict=True):
        if other is not None:
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)
    found, known = everything(actual), everything(expected)
    for name, value in known.items():
        if name.split()[0] in ("client", "ledger"):
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, equal_nan=True)


# ---- what is sent -------------------------------------------------------------------------------


def assert_booked(method, wire, snapshots):
    """The ledger has, round by round and client by client, the closed forms of the exchanges."""
    booked = {way: snapshots.rounds[0][f"ledger {way}"] * 0 for way in ("downlink", "uplink")}
    for number, actual in enumerate(snapshots.rounds):
        for exchange in wire.exchanges:
            if exchange.round == number:
                for floats, way in zip(method.cost(exchange), booked, strict=True):
                    booked[way][exchange.client] += int(8 * floats)
        for way, counts in booked.items():
            assert torch.equal(actual[f"ledger {way}"], counts), f"{way}, round {number}"
            assert actual[f"row comm/{way}_bytes"] == counts.sum()


@EVERY_METHOD
def test_the_ledger_equals_the_closed_form(fit, method):
    q = forms.with_classes(4) if method.classes else forms.different(4)
    wire, snapshots = Wire(), Snapshots()
    arguments = dict(batch_size=None, loss=q.loss, **method.settle)
    algorithm = method.make(q.problem.network(0.3), **arguments)
    rounds, count = (6, None) if method.everyone else (6, 2)
    fit(algorithm, q.problem, rounds, callbacks=[wire, snapshots], clients_per_round=count)
    assert len(wire.exchanges) == rounds * (1 if method.pooled else count or 4)
    assert_booked(method, wire, snapshots)
    # A client reads no more numbers than are booked, and one flag.
    if method.name not in FREE:
        most = [method.cost(exchange)[0] for exchange in wire.exchanges]
        for exchange, booked in zip(wire.exchanges, most, strict=True):
            assert exchange.read <= booked + 1
        assert max(wire.evaluated) <= max(most) + 1
    costs = {method.cost(exchange) for exchange in wire.exchanges}
    whole = {(algorithm.space.size, algorithm.space.size)}
    if method.cost is forms.dense:
        assert costs == whole
    else:
        assert costs - whole, "the closed form was not put to the test"


def in_the_model(exchange, name):
    """A client state at its places among the P values; 0 at the others."""
    state = exchange.state[name]
    if len(state) == exchange.size:
        return state
    model = np.zeros(exchange.size)
    model[exchange.algorithm.personal_part.numpy()] = state
    return model


def leaks(wire, name):
    """Clients whose state `name` the server could work out: it, or the part of a layer, is a linear
    combination of what the client has sent and received so far."""
    actual = set()
    for at, last in enumerate(wire.exchanges):
        size, private = last.size, in_the_model(last, name)
        known = [
            vector
            for x in wire.exchanges[: at + 1]
            if x.client == last.client
            for values in (x.received, *x.sent.values())
            if values.size % size == 0
            for vector in values.reshape(-1, size)
        ]
        spans = [slice(0, size), *(layer.span for layer in last.algorithm.space.layers)]
        for span in spans:
            part, basis = private[span], np.reshape(known, (-1, size))[:, span].T
            if basis.shape[1] < len(part) and part.any():
                rest = part - basis @ np.linalg.lstsq(basis, part, rcond=None)[0]
                if np.linalg.norm(rest) < 1e-6 * np.linalg.norm(part):
                    actual.add(last.client)
    return actual


class Disturb(pl.Callback):
    """Changes what clients keep between the first two rounds."""

    def __init__(self, names):
        self.names = names

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            for name in self.names:
                ids = pl_module.store.seen(name)
                rows = pl_module.store.read(name, ids)
                pl_module.store.write(name, ids, rows + 0.1 * torch.rand_like(rows))


def assert_private(train, method):
    """What is sent does not give the private states away, nor depends on them where it can."""
    wire, other = Wire(), Wire()
    train(method, 2, trace=[EVERYONE] * 2, callbacks=[wire])
    train(method, 2, trace=[EVERYONE] * 2, callbacks=[other, Disturb(method.private)])
    for name in method.private:
        assert all(exchange.state[name].any() for exchange in wire.exchanges)
        assert leaks(wire, name) == set()
    if method.trained_with_private:
        return
    for one, two in zip(wire.exchanges[len(SIZES) :], other.exchanges[len(SIZES) :], strict=True):
        assert not any((one.state[name] == two.state[name]).all() for name in method.private)
        assert one.sent.keys() == two.sent.keys()
        assert all((one.sent[name] == two.sent[name]).all() for name in one.sent)


@pytest.mark.parametrize("method", PERSONAL.values(), ids=PERSONAL)
def test_personal_parameters_are_never_sent(train, method):
    assert_private(train, method)


class Mixed(FedSLR):
    """What it sends depends on p_i."""

    def client_update(self, clients, w):
        return super().client_update(clients, w) - 0.5 * clients.state["p"]


class Fresh(FedSLR):
    """Sends w + p_i, with a p_i that depends on nothing that the client kept."""

    def client_update(self, clients, w):
        clients.state["p"] = torch.zeros_like(clients.state["p"])
        super().client_update(clients, w)
        return w + clients.state["p"]


class Head(LocalTrain):
    """Sends a layer, which the server can have by itself."""

    def client_update(self, clients, w):
        super().client_update(clients, w)
        return {"head": Message(clients.state["w"] * self.space.mask(["2.weight"]), 64)}


class Everything(FedPer):
    """Says that it sends a body, and sends the head, too."""

    def client_update(self, clients, w):
        body = super().client_update(clients, w)
        return Message(body.values + self.embedded(clients.state["head"]), body.nbytes)

    def embedded(self, head):
        v = head.new_zeros(len(head), self.space.size)
        v[:, self.personal_part] = head
        return v


@pytest.mark.parametrize("kind", [Mixed, Fresh, Head, Everything])
def test_a_leak_would_show(train, kind):
    honest = METHODS[{Head: "LocalTrain", Everything: "FedPer"}.get(kind, "FedSLR")]
    with pytest.raises(AssertionError):
        assert_private(train, dataclasses.replace(honest, kind=kind))
