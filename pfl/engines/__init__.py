"""How a network is run with the models of many clients: engines, batches, steps, threads."""

from pfl.engines.base import Engine, EngineName
from pfl.engines.batch import Batch, default_loss
from pfl.engines.debug import DebugError
from pfl.engines.oracle import Oracle

__all__ = ["Batch", "DebugError", "Engine", "EngineName", "Oracle", "default_loss"]
