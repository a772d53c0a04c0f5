"""A server and parties in processes of their own, which are killed at random moments.

    python -m pytest tests/deploy/kills.py
    KILLS=50 python -m pytest -o faulthandler_timeout=0 -s tests/deploy/kills.py -k flower

The second is over Flower's real processes, with TLS and keys. They take minutes, and are not among
the tests that pytest finds.
"""

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from multiprocessing import connection
from pathlib import Path

import pytest
import torch
import yaml

from pfl.cli import main
from pfl.deploy.app import run_server
from pfl.deploy.channel import Channel
from pfl.deploy.wire import unpack
from tests.algorithms.methods import differing
from tests.commands import ROOT, call, free_port
from tests.deploy.computed import computed

PARTIES, ROUNDS = 4, 60
WORDS = ["--config", "quickstart", "--data.num_clients", PARTIES, "--trainer.precision", "64-true"]
WORDS += ["--trainer.max_epochs", ROUNDS, "--trainer.callbacks", "[]", "--loop.evaluate", "[test]"]
WORDS += ["--loop.clients_per_round", "null", "--loop.clients_at_once", 1, "--model", "FedSLR"]
WORDS += ["--model.network", "MLP", "--model.network.in_features", 64]
WORDS += ["--model.network.hidden", "[8]", "--model.lr", 0.05, "--model.batch_size", 20]


class Sockets(Channel):
    """Workers of parties on this machine; peer i is at the socket file `paths[i]`."""

    def __init__(self, paths):
        self.paths = paths

    def peers(self):
        return {peer for peer, path in enumerate(self.paths) if path.exists()}

    def ask(self, messages, timeout):
        answers, waiting = {}, {}  # by peer, and the peers by connection
        for peer, message in messages.items():
            try:
                worker = connection.Client(str(self.paths[peer]), "AF_UNIX")
                worker.send_bytes(message)
                waiting[worker] = peer
            except OSError as error:
                answers[peer] = f"{self.paths[peer]}: {error.strerror or error}"
        end = time.monotonic() + timeout
        while waiting and (left := end - time.monotonic()) > 0:
            for ready in connection.wait(list(waiting), left):
                peer, worker = waiting.pop(ready), ready
                try:
                    answers[peer] = worker.recv_bytes()
                except (EOFError, OSError) as error:
                    answers[peer] = f"the worker has ended ({type(error).__name__})"
                worker.close()
        for worker in waiting:
            worker.close()
        return answers


class Noted(Sockets):
    """Notes in a file, for each round, which parties were asked and which have answered."""

    def ask(self, messages, timeout):
        answers = super().ask(messages, timeout)
        requests = [unpack(message) for message in messages.values()]
        if requests and requests[0]["do"] == "train":
            fit = [p for p, a in answers.items() if isinstance(a, bytes) and b"refused" not in a]
            with Path("noted").open("a") as file:
                note = [requests[0]["task"]["round"], sorted(messages), sorted(fit)]
                file.write(f"{json.dumps(note)}\n")
        return answers


def serve(folder, server):
    """The target of the processes: the server, or the party of a file."""
    os.chdir(folder)
    torch.set_num_threads(1)
    if not isinstance(server, bool):
        main(["node", "--config", server])
    channel = Noted([Path(f"app/parties/{party}.sock") for party in range(PARTIES)])
    options = {"name": "run", "runs": "runs", "timeout": 120, "parties": PARTIES}
    run_server(channel, Path("app"), options)


def compare(folder, states, count):
    """Compares a run's models and states with those of a simulation with the same drop-outs."""
    notes = {note[0]: note[1:] for note in map(json.loads, Path("noted").read_text().splitlines())}
    rounds = [notes[index] for index in range(count)]
    trace = [asked for asked, _ in rounds]
    dropout = [sorted({*asked} - {*answered}) for asked, answered in rounds]
    words = [*WORDS, "--loop.trace", json.dumps(trace), "--loop.dropout", json.dumps(dropout)]
    words += ["--trainer.max_epochs", count, "--trainer.name", "run"]
    status, _, err = call("fit", *words, "--trainer.default_root_dir", "s")
    assert status == 0, err
    actual = computed(folder / "runs/run", states)
    expected = computed(folder / "s/run")
    unknown = "dropped", "wire_bytes", "train/samples", "samples_seen", "parameters/personalized"
    names = {name for name in differing(actual, expected) if not name.endswith(unknown)}
    assert {name for name in names if " test/" not in name} == set(), (trace, dropout)
    return sum(map(len, dropout))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.cli
def test_a_federation_that_is_killed_at_random_is_the_simulation(tmp_path, monkeypatch):
    """Everything but numbers of evaluations, which lack the scores of a party that is away.

    A party's model is exported from the server's checkpoint and its own states.
    """
    monkeypatch.chdir(tmp_path)
    assert call("deploy", *WORDS, "--out", "app")[0] == 0
    names = [True]
    for party in range(PARTIES):
        (tmp_path / f"app/party-{party}.yaml").write_text(yaml.safe_dump({"client": party}))
        names.append(f"app/party-{party}.yaml")
    context, draw = multiprocessing.get_context("forkserver"), random.Random()
    context.set_forkserver_preload(["pfl.deploy.app", "pfl.callbacks"])

    def start(name):
        process = context.Process(target=serve, args=(str(tmp_path), name))
        process.start()
        return process

    processes = {name: start(name) for name in names}
    victims = draw.sample([*names, *names, True], 11)
    end = time.monotonic() + 300
    while processes[True].exitcode != 0 and time.monotonic() < end:
        time.sleep(draw.uniform(0, 3))
        if victims and Path("noted").exists() and processes[True].is_alive():
            processes[name := victims.pop()].kill()
            processes[name].join()
            processes[name] = start(name)
    for process in processes.values():
        process.kill()
        process.join()
    assert processes[True].exitcode == 0

    compare(tmp_path, tmp_path / "app/parties", ROUNDS)

    for run, more in (("runs", ["--states", "app/parties"]), ("s", [])):
        path = ["--ckpt_path", f"{run}/run/checkpoints/last.ckpt", "--client", 1]
        assert call("export", *path, *more, "--out", f"{run}/models")[0] == 0
    one, other = (Path(run, "models/client1/model.safetensors") for run in ("runs", "s"))
    assert one.read_bytes() == other.read_bytes()
    status, _, err = call(
        "export", *path[:1], "runs/run/checkpoints/last.ckpt", *path[2:], "--out", "x"
    )
    assert (status, err) == (2, "error: export: --states: party 1 has them; give its folder\n")


def serve_party(folder, party):
    """The target of a party's process."""
    os.chdir(folder)
    with Path(f"{party}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    main(["node", "--config", f"app-keys/party-{party}/party.yaml"])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.cli
def test_a_federation_over_flower_that_is_killed_at_random_is_the_simulation(tmp_path, monkeypatch):
    """The SuperLink and the server's program are killed together, and parties one by one."""
    pytest.importorskip("flwr", reason="flwr is not installed: pip install '.[deploy]'")
    kills = int(os.environ.get("KILLS", "10"))
    rounds = 2 * kills
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, "--trainer.name", "run", "--trainer.max_epochs", rounds]
    assert call("deploy", *words, "--out", "app", "--tls", "localhost")[0] == 0
    server = Path("app/server_app.py")
    text = server.read_text()
    server.write_text(text.replace("from pfl.deploy.flower", "from tests.deploy.noted"))
    port = free_port()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PFL_NOTED": str(tmp_path / "noted")}
    env["OMP_NUM_THREADS"] = "1"
    timeout = "timeout=90.0"  # a message that a killed party has fetched has no answer
    words = ["-m", "pfl.deploy.here", "app", "--server", "--keys", "app-keys", "--port", str(port)]
    words += ["--run-config", timeout]
    for party in range(PARTIES):
        file = Path(f"app-keys/party-{party}/party.yaml")
        file.write_text(file.read_text().replace("localhost:8000", f"localhost:{port}"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pfl.deploy.app", "pfl.callbacks", "flwr.supernode.main"])

    def start(name):
        if name == "server":
            with Path("server.log").open("a") as log:
                options = {"env": env, "stdout": log, "stderr": subprocess.STDOUT}
                return subprocess.Popen([sys.executable, *words], **options)
        process = context.Process(target=serve_party, args=(str(tmp_path), name))
        process.start()
        return process

    def status(name):
        if name == "server":
            return processes[name].poll()
        return processes[name].exitcode

    def end(name):
        processes[name].kill()
        if name == "server":
            processes[name].wait()
        else:
            processes[name].join()

    processes = {name: start(name) for name in ("server", *range(PARTIES))}
    draw = random.Random()
    victims = ["server"] * max(1, kills // 8)
    victims += [draw.randrange(PARTIES) for _ in range(kills - len(victims))]
    draw.shuffle(victims)
    last = time.monotonic() + 120 * kills
    seen = 0
    while status("server") != 0 and time.monotonic() < last:
        time.sleep(draw.uniform(0, 4))
        for name in processes:  # as systemd does it
            if status(name) not in (None, 0):
                processes[name] = start(name)
        lines = 0
        if Path("noted").exists():
            lines = len(Path("noted").read_text().splitlines())
        if victims and lines > seen:  # a round has ended since
            seen = lines
            name = victims.pop()
            end(name)
            processes[name] = start(name)
    for name in processes:
        end(name)
    assert status("server") == 0, Path("server.log").read_text()[-3000:]
    assert victims == []
    states = tmp_path / "states"
    states.mkdir()
    for party in range(PARTIES):
        for path in Path(f"app-keys/party-{party}/states").glob(f"*/client-{party}"):
            (states / path.parent.name).mkdir(exist_ok=True)
            path.rename(states / path.parent.name / path.name)
    lost = compare(tmp_path, states, rounds)
    print(f"{kills} kills, {rounds} rounds, {lost} messages lost")
