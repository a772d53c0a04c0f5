"""felisat/clustered-federated-learning, the code of CFL's authors: its clients and server.

The loop over rounds stands in a notebook and is written out here, from the first round on instead
of the twentieth. Replaced are its random splits of the samples, its loaders, and an argument that
newer releases of scikit-learn call otherwise.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    EPOCHS,
    EVERYONE,
    RATE,
    ROUNDS,
    Epochs,
    Iterates,
    Problem,
    first_network,
    main,
    tensors,
    vector,
)

EPS_1, EPS_2, DECAY = 10.0, 0.1, 0.99  # the last in `compute_weight_update`


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The models of all clients."""
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(checkout))
    devices: Any = importlib.import_module("fl_devices")
    clustering = devices.AgglomerativeClustering
    devices.AgglomerativeClustering = lambda affinity, linkage: clustering(
        metric=affinity, linkage=linkage
    )

    def make() -> torch.nn.Module:
        network: torch.nn.Module = first_network(problem.start)
        return network

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=RATE / DECAY)

    clients = [
        devices.Client(make, optimizer, list(zip(*tensors(x, y), strict=True)), i)
        for i, (x, y) in enumerate(zip(problem.inputs, problem.targets, strict=True))
    ]
    server = devices.Server(make, clients[0].data)
    for client in clients:
        client.synchronize_with_server(server)
    clusters, rounds = [np.array(EVERYONE)], []
    for now in range(ROUNDS):
        for client in clients:
            loader = Epochs(problem, now, client.id, [("train", EPOCHS)], tensors)
            client.compute_weight_update(epochs=EPOCHS, loader=loader)
            client.reset()
        similarities, new = server.compute_pairwise_similarities(clients), []
        for idc in clusters:
            members = [clients[i] for i in idc]
            large = server.compute_max_update_norm(members) > EPS_2
            if server.compute_mean_update_norm(members) < EPS_1 and large and len(idc) > 2:
                new += [idc[part] for part in server.cluster_clients(similarities[idc][:, idc])]
            else:
                new.append(idc)
        clusters = new
        server.aggregate_clusterwise([[clients[i] for i in idc] for idc in clusters])
        rounds.append(np.stack([vector(client.W.values()) for client in clients]))
    return {"CFL": {"v": np.stack(rounds)}}


if __name__ == "__main__":
    main(theirs)
