"""A Flower `ClientApp` whose clients are those of a data module of `datamodules`.

The commands `pip install "flwr[simulation]"` and `python examples/flower_client_app.py` run five
rounds of Flower's FedAvg with ten clients, and print the mean test accuracy of the clients.
Flower's node of the partition i trains on `data.client(i)`.
"""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from pfl.datamodules import ClientDataModule, DigitsDataModule, Dirichlet

CLIENTS, ROUNDS = 10, 5
client_app, server_app = ClientApp(), ServerApp()


def network() -> nn.Sequential:
    """Returns a network for the digits of scikit-learn, images [n, 1, 8, 8]."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def received(message: Message, context: Context) -> tuple[nn.Module, ClientDataModule]:
    """Returns the network with the server's parameters, and the data of the client."""
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = DigitsDataModule(num_clients=CLIENTS, partition=Dirichlet(0.3), batch_size=16)
    return model, data.client(int(context.node_config["partition-id"]))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Trains the network on the client's training samples for an epoch."""
    model, client = received(message, context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = client.train_dataloader()
    # The sampler shuffles anew in every round.
    loader.sampler.set_epoch(int(message.content["config"]["server-round"]))  # type: ignore[attr-defined]
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(client.train)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Scores the network on the client's test samples."""
    model, client = received(message, context)
    with torch.no_grad():
        right = [(model(x).argmax(1) == y) for x, y in client.test_dataloader()]
    accuracy = torch.cat(right).float().mean().item()
    metrics = MetricRecord({"accuracy": accuracy, "num-examples": len(client.test)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Runs Flower's FedAvg with all clients."""
    arrays = ArrayRecord(network().state_dict())
    result = FedAvg().start(grid, arrays, num_rounds=ROUNDS)
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: test accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server_app, client_app, num_supernodes=CLIENTS)
