"""Clients as algorithms see them: their samples, the order of the samples, and their states."""

from pfl.clients.schedule import LocalSchedule
from pfl.clients.view import ClientData, Clients

__all__ = ["ClientData", "Clients", "LocalSchedule"]
