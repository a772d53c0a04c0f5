"""The server of an app, which notes for each round which parties were asked and which answered."""

import json
import os
from pathlib import Path

from pfl.deploy.app import run_server
from pfl.deploy.flower import FlowerGrid, end_with_parent
from pfl.deploy.wire import unpack


class NotedGrid(FlowerGrid):
    def ask(self, messages, timeout):
        answers = super().ask(messages, timeout)
        requests = [unpack(message) for message in messages.values()]
        if requests and requests[0]["do"] == "train":
            order = self.order
            trained = []
            for peer, answer in answers.items():
                if isinstance(answer, bytes) and b"refused" not in answer:
                    trained.append(peer)
            line = [
                requests[0]["task"]["round"],
                sorted(order.index(peer) for peer in messages),
                sorted(order.index(peer) for peer in trained),
            ]
            with Path(os.environ["PFL_NOTED"]).open("a") as file:
                file.write(f"{json.dumps(line)}\n")
        return answers


def serve(grid, app, options):
    """Runs the server of an app; `nodes` of its options has the parties in order."""
    end_with_parent()
    channel = NotedGrid(grid)
    channel.order = [int(node) for node in options["nodes"].split(",")]
    run_server(channel, app, options)
