"""Forged answers and requests, drawn at random: nobody ends, and no number leaves its range."""

import copy
import math
import random
import warnings
from typing import Any

import numpy as np
import pytest

from pfl.deploy import schema
from pfl.deploy.wire import WireError, pack, unpack
from tests.algorithms.methods import METHODS

BIG = 10**40
PLAIN: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    5,
    BIG,
    -BIG,
    1 << 62,
    0.5,
    -1e300,
    1e308,
    math.nan,
    math.inf,
]
PLAIN += ["", "w", "=1+1", "a\nb", "\x1b[2J", "x" * 5000, [], {}, [[]], {"#": 0}, [math.nan] * 3]
ARRAYS: list[Any] = [
    *(np.zeros(0), np.zeros((1, 26)), np.full((1, 26), 1e20), np.full((1, 26), 3e38, np.float32)),
    *(np.full((1, 26), np.nan), np.array(5.0), np.array([-1e300]), np.array([2**62]), np.ones(3)),
    *(np.zeros((1, 26), bool), np.zeros((1, 0, 26)), np.full((1, 26), -np.inf)),
]
KINDS = ["FedAvg", "SCAFFOLD, option I", "FedPAC", "Ditto"]
KINDS.append(next(name for name in METHODS if name.startswith("IFCA")))


def places(value, path=()):
    """Yields the paths of all parts of a value."""
    yield path
    parts = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    for key, part in parts:
        yield from places(part, (*path, key))


def forged(value, draw):
    """Returns a value with one part that is another one, is missing, or has another name."""
    value = copy.deepcopy(value)
    *above, last = draw.choice([path for path in places(value) if path])
    parent = value
    for key in above:
        parent = parent[key]
    kind = draw.randrange(10)
    if kind == 0:
        del parent[last]
    elif kind == 1 and isinstance(parent, dict):
        parent[draw.choice(["=cmd", "client", "w", "train", "a\nb", "x" * 99])] = parent.pop(last)
    else:
        parent[last] = copy.deepcopy(draw.choice(PLAIN + ARRAYS))
    try:
        return pack(value)
    except (WireError, RecursionError):  # it cannot be written: bytes instead
        return draw.randbytes(draw.randrange(200))


def damaged(message, draw):
    """Returns a message whose bytes are cut, longer or changed."""
    kind = draw.randrange(3)
    if kind == 0:
        return message[: draw.randrange(len(message))]
    if kind == 1:
        return message + draw.randbytes(5)
    place = draw.randrange(len(message))
    return message[:place] + draw.randbytes(2) + message[place + 2 :]


def check_forged_answers(federation, monkeypatch, seed, name):
    """Three of four parties forge every second answer; returns how many were forged."""
    draw = random.Random(seed)
    monkeypatch.setattr(schema, "STRIKES", 1 << 30)
    parties = federation(name)
    right = parties.channel.answer
    count = 0

    def answer(client, message, fault):
        nonlocal count
        told = right(client, message, fault)
        if client == 0 or draw.random() < 0.5 or unpack(message)["do"] == "hello":
            return told
        count += 1
        if draw.random() < 0.2 or not unpack(told):
            return damaged(told, draw)
        return forged(unpack(told), draw)

    parties.channel.answer = answer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parties.train()
    method = parties.method
    assert method.rounds == 4 and method.global_model.isfinite().all()
    assert all(schema.PLAIN.fullmatch(key) and math.isfinite(x) for key, x in method.row.items())
    assert method.row["comm/uplink_bytes"] < 1e6  # 4 rounds of 4 messages of some hundred bytes
    for table in method.recorded.values():
        assert all(np.isfinite(column).all() for column in table.values())
    for scores in method.evaluation.scores.values():
        known = scores["accuracy"][~np.isnan(scores["accuracy"])]
        assert ((known >= 0) & (known <= 1)).all() and (scores["count"] >= 0).all()
        assert all((np.isnan(x) | (np.abs(x) <= 1e30)).all() for x in scores.values())
    return count


@pytest.mark.parametrize("name", KINDS)
def test_forged_answers_end_no_server(federation, monkeypatch, name):
    for seed in range(3):
        assert check_forged_answers(federation, monkeypatch, seed, name) >= 3


@pytest.mark.parametrize("name", KINDS)
def test_forged_requests_end_no_worker(federation, name):
    """After all of them, the worker answers as before."""
    draw = random.Random(name)
    parties = federation(name).train()
    worker = parties.channel.workers[2]
    requests = [request for client, request, _ in parties.channel.told if client == 2]
    refused = 0
    for _ in range(150):
        request = draw.choice(requests)
        message = forged(request, draw)
        if draw.random() < 0.1:
            message = damaged(pack(request), draw)
        refused += "refused" in unpack(worker.answer(message))
    assert refused > 75
    assert {*worker.folder.rglob("*.npz")} == {*worker.folder.glob("*/client-2/round-*.npz")}
    told = unpack(worker.answer(pack({"do": "hello", "agreed": worker.agreed})))
    assert told["client"] == 2
