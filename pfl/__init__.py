"""Personalized federated learning on PyTorch Lightning."""

from pfl import _path  # noqa: F401 (first: the imports below find `models` by it)
from pfl.distributed.strategy import ClientParallelStrategy
from pfl.errors import ConfigError
from pfl.rounds.loop import FederatedLoop
from pfl.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["ClientParallelStrategy", "ConfigError", "FederatedLoop", "Trainer", "__version__"]
