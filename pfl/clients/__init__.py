"""Clients as algorithms see them: their samples, the order of these, and their states."""

from pfl.clients.view import ClientData, Clients, steps_per_epoch

__all__ = ["ClientData", "Clients", "steps_per_epoch"]
