"""Engines for networks that are chains of common layers, without autograd and the interpreter.

This folder can be deleted: every run then goes on with another engine. Its kernels are compiled by
TorchScript, which PyTorch deprecates.
"""

from pfl.engines.chains.engine import ChainEngine, CompiledChainEngine
from pfl.engines.registry import register

for _engine in (CompiledChainEngine, ChainEngine):
    register(_engine, "auto", "vmap", before="shared body")
