"""Two processes on one device, as a program: the first writes the trained weights of a layer.

python -m benchmarks.gpu.two_processes FILE DEVICE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import world
from benchmarks.gpu.measuring import set_precision
from pfl import ClientParallelStrategy
from pfl.algorithms import SCAFFOLD


def main() -> None:
    file = Path(sys.argv[1])
    device = torch.device(sys.argv[2])
    set_precision("fp32")
    settings: dict[str, Any] = {"devices": 2, "strategy": "client_parallel"}
    if device.type == "cuda":
        settings = {"devices": 1, "strategy": ClientParallelStrategy(processes_per_device=2)}
    done = world.fit(world.method(SCAFFOLD, world.mlp), device, settings=settings)
    if done.trainer.is_global_zero:
        torch.save(done.state_dict()["network.body.linear1.weight"].cpu(), file)


if __name__ == "__main__":
    main()
