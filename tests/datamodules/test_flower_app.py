"""The Flower app in `examples`: its messages, without Flower's servers and processes."""

import runpy
import time
from pathlib import Path

import pytest
import torch

flwr = pytest.importorskip("flwr")
EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_client_app.py"


def made(kind, content):
    """A message of the server to a client; without its processes the metadata are set here."""
    from flwr.app import Message, Metadata

    place = {"run_id": 1, "message_id": "m", "src_node_id": 1, "dst_node_id": 2, "group_id": ""}
    times = {"reply_to_message_id": "", "created_at": time.time(), "ttl": 60.0}
    return Message(content=content, metadata=Metadata(**place, **times, message_type=kind))


def test_the_client_app_trains_on_the_samples_of_its_partition():
    """One epoch by hand, on the loader of the same client, gives the same parameters."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict

    from datamodules import DigitsDataModule, Dirichlet

    app = runpy.run_path(str(EXAMPLE))
    start = app["network"]()
    content = {
        "arrays": ArrayRecord(start.state_dict()),
        "config": ConfigRecord({"server-round": 4}),
    }
    context = Context(1, 2, {"partition-id": 3, "num-partitions": 10}, RecordDict(), {})
    message = made("train", RecordDict(content))
    reply = app["client_app"](message, context).content
    client = DigitsDataModule(10, Dirichlet(0.3), batch_size=16).client(3)
    loader = client.train_dataloader()
    loader.sampler.set_epoch(4)
    for x, y in loader:
        gradients = torch.autograd.grad(
            torch.nn.functional.cross_entropy(start(x), y), tuple(start.parameters())
        )
        with torch.no_grad():
            for parameter, gradient in zip(start.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    sent = reply["arrays"].to_torch_state_dict()
    for name, value in start.state_dict().items():
        torch.testing.assert_close(sent[name], value)
    assert reply["metrics"]["num-examples"] == len(client.train)
    message = made("evaluate", RecordDict({"arrays": reply["arrays"]}))
    metrics = app["client_app"](message, context).content["metrics"]
    x, y = client.samples.gather(torch.from_numpy(client.test))
    assert metrics["accuracy"] == pytest.approx((start(x).argmax(1) == y).float().mean().item())
