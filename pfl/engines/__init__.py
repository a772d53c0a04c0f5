"""How a network is run with the models of many clients: engines, batches, steps, threads."""

from pfl.engines.base import Engine, EngineName
from pfl.engines.batch import Batch, StepBlock, default_loss
from pfl.engines.debug import DebugError
from pfl.engines.local_step import LocalOptimizer, OptimizerFactory, Step
from pfl.engines.oracle import Oracle
from pfl.engines.select import select_engine

__all__ = [
    "Batch",
    "DebugError",
    "Engine",
    "EngineName",
    "LocalOptimizer",
    "OptimizerFactory",
    "Oracle",
    "Step",
    "StepBlock",
    "default_loss",
    "select_engine",
]
