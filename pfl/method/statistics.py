"""Which running statistics belong to a model that is scored or exported."""

from __future__ import annotations

from dataclasses import replace

from pfl.clients import Clients
from pfl.method.hooks import Method


def kind_evaluated(method: Method, *, unseen: bool) -> str:
    """Returns whose statistics a client's evaluated model has, as `of_model` takes it.

    A client that never trains (`unseen`) has those of the global model, where there is one.
    """
    if method.has_global and (unseen or not method.has_personalized):
        return "global"
    return "personalized"


def of_model(kind: str, method: Method, clients: Clients) -> Clients:
    """Returns the clients with the statistics of their "global" or "personalized" models."""
    if kind == "personalized":
        if method.personal_buffers is None:
            return clients
        return clients.personal
    if method.sends_statistics:
        return replace(clients, buffers=method.global_buffers.repeat(len(clients), 1))
    return replace(clients, buffers=clients.state.get("buffers"))
