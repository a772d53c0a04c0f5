"""The models of a run as state dicts of the plain network, for other programs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from pfl.clients import Clients
from pfl.errors import ConfigError
from pfl.method import exchange
from pfl.method.algorithm import FederatedAlgorithm
from pfl.method.messenger import MessengerMethod, own_network
from pfl.method.statistics import kind_evaluated, of_model
from pfl.models.adapters import adapted_layers, merged
from pfl.parameters import private_copy


def global_network(algorithm: FederatedAlgorithm) -> nn.Module:
    """Returns a copy of the network with the global model and its running statistics.

    Where clients share a messenger, it is the messenger.

    Raises:
        ConfigError: The method has no global model, or no running statistics of it.
    """
    name = type(algorithm).__name__
    if isinstance(algorithm, MessengerMethod) and not algorithm.oracle.buffers.size:
        return algorithm.shared_network()
    if not algorithm.has_global:
        raise ConfigError(f"--global: {name} has no global model; give --client")
    if algorithm.oracle.buffers.size and algorithm.buffer_policy == "local":
        raise ConfigError(
            "--global: with model.buffers: local every client has running statistics of "
            "its own, and the global model has none; give --client"
        )
    return _network(algorithm, algorithm.global_model, None)


def client_network(algorithm: FederatedAlgorithm, client: int) -> nn.Module:
    """Returns a copy of the network with the model that a client is evaluated with.

    This is the client's personalized model. A client that never trains (`loop.unseen`) has the
    method's first model for newcomers; `begin_evaluation` must have been called.

    Args:
        algorithm: A method with the states of a checkpoint.
        client: The client's id.

    Raises:
        ConfigError: The method has the same model for all clients, or there is no such client.
    """
    last = algorithm.run.loop.num_clients - 1
    if not 0 <= client <= last:
        raise ConfigError(
            f"client_network: {client}; it must be a client's number from 0 to {last}"
        )
    if not has_own_models(algorithm):
        name = type(algorithm).__name__
        raise ConfigError(f"export: --client: {name} has one model for all clients; give --global")
    return network_of(algorithm.of_client(client), client_rows(algorithm, client))


def network_of(algorithm: FederatedAlgorithm, clients: Clients) -> nn.Module:
    """Returns a copy of the network with the model of one client, which has its states.

    Args:
        algorithm: The client's method.
        clients: The client, with what it has received.
    """
    with torch.no_grad():
        w, buffers = own_model(algorithm, clients)
    return _network(algorithm, w[0], None if buffers is None else buffers[0])


def own_model(algorithm: FederatedAlgorithm, clients: Clients) -> tuple[Tensor, Tensor | None]:
    """Returns the model [1, P] of one client, which has its states, and its running statistics.

    A client that never trains has a newcomer's first model.
    """
    unseen = int(clients.ids[0]) in algorithm.unseen_clients
    if unseen:
        w = algorithm.newcomer(clients)
    elif algorithm.has_personalized:
        w = algorithm.personalized(clients)
    else:
        w = algorithm.global_model[None]
    return w, of_model(kind_evaluated(algorithm, unseen=unseen), algorithm, clients).buffers


def has_own_models(algorithm: FederatedAlgorithm) -> bool:
    """Returns whether clients have models, or running statistics, of their own."""
    own_statistics = algorithm.oracle.buffers.size > 0 and algorithm.buffer_policy == "local"
    return algorithm.has_personalized or own_statistics


def finetuned_network(algorithm: FederatedAlgorithm, client: int, steps: int) -> nn.Module:
    """Returns a copy of the network with a client's model after local steps, as `loop.finetune`.

    The steps are taken on the client's training samples in the run. A client that never trains
    begins with the method's first model for newcomers.
    """
    clients = client_rows(algorithm, client)
    algorithm = algorithm.of_client(client)
    unseen = client in algorithm.unseen_clients
    begin = algorithm.adaptation_start
    if unseen:
        begin = algorithm.newcomer
    rate = algorithm.run.loop.finetuning.lr or algorithm.learning_rate(algorithm.rounds)
    start = begin(clients)
    clients = of_model(kind_evaluated(algorithm, unseen=unseen), algorithm, clients)
    w = algorithm.adapt(clients, start, steps=steps, lr=rate)
    return _network(algorithm, w[0], None if clients.buffers is None else clients.buffers[0])


def plain_network(network: nn.Module) -> nn.Module:
    """Returns a network whose adapters are part of its weights, where they change these."""
    try:
        return merged(network) if adapted_layers(network) else network
    except ValueError:
        return network


def client_rows(algorithm: FederatedAlgorithm, client: int) -> Clients:
    """Returns one client with its states."""
    data = algorithm.run.loop.client_data(algorithm.device)
    clients = Clients(np.array([client]), algorithm.rounds, data)
    algorithm.load_state(clients)
    exchange.begin(algorithm.of_client(client), algorithm.stages, clients)
    return clients


def _network(algorithm: FederatedAlgorithm, w: Tensor, buffers: Tensor | None) -> nn.Module:
    """Returns a copy of the network, in evaluation mode, with a model [P] and its statistics.

    Of a network with a messenger it is the client's own part.
    """
    network = private_copy(algorithm.network).eval()
    with torch.no_grad():
        for name, values in algorithm.space.split(w).items():
            network.get_parameter(name).data = values.clone()
        if buffers is not None:
            algorithm.oracle.buffers.write(network, buffers)
    return own_network(network)
