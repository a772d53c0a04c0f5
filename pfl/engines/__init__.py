"""How a network is run with the models of many clients: engines, batches, steps, threads."""

import importlib
import pkgutil

from pfl.engines.base import Engine, EngineName
from pfl.engines.batch import Batch, default_loss
from pfl.engines.debug import DebugError
from pfl.engines.oracle import Oracle
from pfl.engines.registry import register

__all__ = ["Batch", "DebugError", "Engine", "EngineName", "Oracle", "default_loss", "register"]

# Each folder here has engines, which it registers; one that is deleted is not missed.
for _module in pkgutil.iter_modules(__path__):
    if _module.ispkg:
        importlib.import_module(f"{__name__}.{_module.name}")
