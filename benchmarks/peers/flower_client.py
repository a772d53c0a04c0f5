"""The client of `run_flower.py`.

A module, so that Flower's actors import it and keep the task that it has loaded; what is defined in
a script is sent along with every message.
"""

from functools import cache

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from benchmarks.peers.task import Task
from benchmarks.peers.with_torch import network, samples, train

client_app = ClientApp()


@cache
def loaded(path: str) -> tuple[Task, nn.Module]:
    """The task and the network of an actor, which serves many clients."""
    task = Task.load(path)
    return task, network(task)


@client_app.train()
def client(message: Message, context: Context) -> Message:
    """One client's local epochs."""
    config = message.content["config"]
    task, module = loaded(config["path"])
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, targets = samples(task, config["client"])
    train(module, task, inputs, targets)
    content = RecordDict(
        {
            "arrays": ArrayRecord(module.state_dict()),
            "metrics": MetricRecord({"num-examples": len(targets)}),
        }
    )
    return Message(content, reply_to=message)
