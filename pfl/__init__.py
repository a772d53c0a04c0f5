"""Personalized federated learning on PyTorch Lightning."""

from pfl import _path  # noqa: F401 (first: the imports below find `models` by it)
from pfl.distributed import orphan  # torch, which the next import needs, takes seconds

orphan.die_with_parent()

from pfl.distributed.strategy import ClientParallelStrategy  # noqa: E402
from pfl.errors import ConfigError  # noqa: E402
from pfl.rounds.loop import FederatedLoop  # noqa: E402
from pfl.trainer import Trainer  # noqa: E402

__version__ = "0.1.0"
__all__ = ["ClientParallelStrategy", "ConfigError", "FederatedLoop", "Trainer", "__version__"]
