"""What a round with real parties costs beyond Flower's own messages.

    python -m benchmarks.deploy > benchmarks/results/deploy.md

Three parties on this machine train an MLP on the 8x8 digits over Flower. A round has two exchanges
with every party, training and evaluation. After each of them the server exchanges empty messages
with an empty function of the same ClientApp, and waits for the answers in the same way, so that the
two take turns.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.compare import machine
from pfl.deploy.app import run_server, write_app
from pfl.deploy.flower import FlowerGrid
from pfl.deploy.wire import unpack

ROOT = Path(__file__).parents[1]
ROUNDS = 5
WORDS = f"""
--config quickstart --trainer.max_epochs {ROUNDS + 2} --trainer.callbacks [] --model FedAvg
--model.network MLP --model.network.in_features 64 --model.network.hidden [8] --model.lr 0.05
--model.batch_size 20 --data.num_clients 3 --loop.clients_per_round null --loop.evaluate [test]
"""
CLIENT = """
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query("empty")
def empty(message, context):
    return Message(RecordDict(), reply_to=message)


@app.query()
def answer(message, context):
    import ours  # what `pfl deploy` writes; an empty message does not import it

    return ours.answer(message, context)
"""


class InTurns(FlowerGrid):
    """Times each exchange with the parties, and an empty one after it."""

    events: list[tuple[str, float, float]]  # what, and when it began and ended

    def ask(self, messages: Any, timeout: float) -> Any:
        from flwr.app import Message, RecordDict

        what = {unpack(message)["do"] for message in messages.values()}
        begin = time.perf_counter()
        answers = super().ask(messages, timeout)
        middle = time.perf_counter()
        if what <= {"train", "evaluate"} and what:
            sent = [Message(RecordDict(), node, "query.empty", ttl=timeout) for node in messages]
            assert len(self.replies(sent, timeout)) == len(sent)
            self.events += [(*what, begin, middle), ("empty", middle, time.perf_counter())]
        return answers


def serve(grid: Any, app: Path, options: Any) -> None:
    """The server of the app; writes the events into the folder of runs."""
    channel = InTurns(grid)
    channel.events = []
    run_server(channel, app, options)
    Path(options["runs"], "events.json").write_text(json.dumps(channel.events))


def measured() -> list[tuple[str, float, float]]:
    """Runs the app, and returns the events."""
    with tempfile.TemporaryDirectory() as folder:
        app, here = Path(folder, "app"), Path.cwd()
        os.chdir(folder)
        write_app(WORDS.split(), app)
        os.chdir(here)
        (app / "client_app.py").rename(app / "ours.py")
        (app / "client_app.py").write_text(CLIENT)
        server = (app / "server_app.py").read_text()
        server = server.replace("from pfl.deploy.flower import", "from benchmarks.deploy import")
        (app / "server_app.py").write_text(server)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        subprocess.run(["sh", "here.sh"], cwd=app, env=env, stdout=sys.stderr, check=True)
        return json.loads(Path(folder, "runs", "events.json").read_text())


def line(name: str, seconds: list[float]) -> str:
    """A line of the table."""
    numbers = statistics.median(seconds), min(seconds), max(seconds)
    return f"| {name} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |"


def main() -> None:
    print(machine(), end="\n\n")
    events = measured()
    begins = [number for number, (what, _, _) in enumerate(events) if what == "train"]
    rounds: dict[str, list[float]] = {"round": [], "two empty exchanges": [], "difference": []}
    for begin, end in itertools.pairwise(begins[1:]):  # the first round warms up
        empty = sum((e - b for what, b, e in events[begin:end] if what == "empty"), 0.0)
        whole = events[end][1] - events[begin][1] - empty
        for name, number in zip(rounds, (whole, empty, whole - empty), strict=True):
            rounds[name].append(number)
    print(f"| seconds, {len(rounds['round'])} rounds | median | min | max |\n|---|---|---|---|")
    for name, seconds in rounds.items():
        print(line(name, seconds))


if __name__ == "__main__":
    main()
