"""Forged messages that are drawn from the protocol and against it: nobody ends, no number leaves.

`PFL_FORGERIES=10000` draws so many of them; without it there are some hundred, always the same.
"""

import json
import math
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pfl.deploy import parties as parties_module
from pfl.deploy import schema
from pfl.deploy.data import SAME
from pfl.deploy.wire import pack, unpack
from tests.algorithms.apart import make_worker
from tests.algorithms.methods import METHODS, SIZES
from tests.commands import table
from tests.deploy.conftest import ROUNDS, Federation
from tests.deploy.forgeries import BROKEN, forged_answer, forged_request

FORGERIES = int(os.environ.get("PFL_FORGERIES", "0"))
HONEST = len(SIZES) - 1  # the last party; those before it say hello before it, and forge all
ANSWERS = 12  # of the forged ones in a run, at least
REQUESTS = 20  # of the forged ones in an example
KINDS = ["FedAvg", "SCAFFOLD, option I", "FedPAC", "Ditto"]
KINDS.append(next(name for name in METHODS if name.startswith("IFCA")))
count = {"answers": 0, "requests": 0, "broken": 0}


def drawn(examples, share):
    """Hypothesis's settings for a share of `FORGERIES`; else for so many examples."""
    if FORGERIES:
        examples = math.ceil(FORGERIES / 2 / share)
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=not FORGERIES,
        database=None,
        phases=[Phase.generate],  # a smaller example takes a run each
        suppress_health_check=list(HealthCheck),
    )


def forge_all(parties, draw):
    """Has all parties but one forge every answer; returns the broken ones, by client and task."""
    right = parties.channel.answer
    broken = []

    def answer(client, message, fault):
        told = right(client, message, fault)
        do = unpack(message)["do"]
        value = unpack(told)
        if client == HONEST or do == "finish" or "refused" in value:
            return told
        forged, kind = forged_answer(draw, do, value, client, len(SIZES))
        count["answers"] += 1
        if kind in BROKEN:
            broken.append((client, do, kind))
        return pack(forged)

    parties.channel.answer = answer
    return broken


def check_files(folder):
    """Checks the names and the ranges of all numbers in the files of a run."""
    most = ROUNDS * len(SIZES) * float(schema.WHOLE)
    for path in sorted(folder.glob("*.csv")):
        for row in table(path):
            for name, text in row.items():
                assert schema.PLAIN.fullmatch(name), name
                if text in ("", "nan"):  # not defined, or nobody has told it
                    continue
                value = float(text)
                where = f"{path.name}: {name}: {text}"
                if "accuracy" in name:
                    assert 0 <= value <= 1, where
                elif "loss" in name:
                    assert abs(value) <= schema.LARGEST, where
                elif "samples" in name or "bytes" in name or "parameters" in name:
                    assert 0 <= value <= most, where
                elif name == "round":
                    assert 1 <= value <= ROUNDS, where
                elif name in ("client", "participants", "dropped"):
                    assert 0 <= value <= len(SIZES), where
                else:
                    assert math.isfinite(value), where
    scores = np.load(folder / "client_scores.npy")
    for name in scores.dtype.names or ():
        column = scores[name].astype(float)
        assert not np.isinf(column).any(), name
    text = (folder / "summary.json").read_text()
    assert "Infinity" not in text
    json.loads(text)


@pytest.mark.parametrize("name", KINDS)
@drawn(3, ANSWERS * len(KINDS))
@given(data=st.data())
def test_forged_answers_end_no_server_and_reach_no_file(name, data):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "STRIKES", 1 << 30)
        patch.setattr(parties_module, "PAUSE", 0.0)
        facts = Federation(Path(folder), name).channel.workers[HONEST].facts
        agreed = {f"data.{key}": facts[key] for key in (*SAME, "classes")}
        parties = Federation(Path(folder), name, agreed=agreed)
        broken = forge_all(parties, data.draw)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            parties.train(enough=1, nodes=range(len(SIZES)), timeout=10)
        method = parties.method
        assert method.rounds == ROUNDS and method.global_model.isfinite().all()
        check_files(Path(folder) / "run")
        lines = [str(one.message) for one in said]
        for client in {client for client, do, _ in broken if do != "hello"}:
            own = [line for line in lines if line.startswith(f"party {client} is left out")]
            asked = [entry for entry in broken if entry[0] == client and entry[1] != "hello"]
            assert len(own) >= len(asked), (asked, own)
        count["broken"] += len(broken)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """For each method the folder of a run, and what its last party was asked and has answered."""
    found = {}
    for name in KINDS:
        parties = Federation(tmp_path_factory.mktemp("asked"), name).train()
        told = [entry for entry in parties.channel.told if entry[0] == HONEST]
        found[name] = parties, told
    return found


@pytest.mark.parametrize("name", KINDS)
@drawn(3, REQUESTS * len(KINDS))
@given(data=st.data())
def test_forged_requests_end_no_worker_and_reach_no_file(asked, name, data):
    parties, told = asked[name]
    requests = [request for _, request, _ in told if request["do"] not in ("hello", "finish")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "party"
        if parties.channel.workers[HONEST].folder.exists():
            shutil.copytree(parties.channel.workers[HONEST].folder, folder)
        worker = make_worker(HONEST, folder, parties.what)
        for _ in range(REQUESTS):
            request, kind = forged_request(data.draw, data.draw(st.sampled_from(requests)))
            count["requests"] += 1
            answer = unpack(worker.answer(pack(request)))
            if kind in BROKEN:
                assert "refused" in answer, request
                count["broken"] += 1
        names = {path.name for path in folder.glob("*")}
        assert names <= {told[1][1]["run"], "second", "x" * 64}
        for path in folder.rglob("*.npz"):
            assert path.stat().st_mode & 0o777 == 0o600
            for key, values in np.load(path).items():
                assert key == "_about" or np.isfinite(values).all(), path
        first = next((request, answer) for _, request, answer in told if request["do"] == "train")
        assert worker.answer(pack({**first[0], "run": "fresh"})) == first[1]


def teardown_module():
    if FORGERIES:
        print(count)
