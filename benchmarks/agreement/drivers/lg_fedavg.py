"""pliang279/LG-FedAvg, the code of LG-FedAvg's authors: its script, as `scripts.py` says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.drivers.scripts import of_networks, run_script
from benchmarks.agreement.problem import EPOCHS, Iterates, Problem, main


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of LG-FedAvg."""
    calls: list[None] = []

    def models(
        networks: list[nn.Module], *args: Any, return_all: bool = False
    ) -> np.ndarray | None:
        """Evaluated are all models before the first round, and after each; and the best ones."""
        if return_all:
            calls.append(None)
        return of_networks(networks) if return_all and len(calls) > 1 else None

    settings: dict[str, Any] = dict(local_ep=EPOCHS, num_layers_keep=1, load_fed="start")
    purposes = [("train", EPOCHS)]
    v = run_script(problem, checkout, "main_lg.py", models, purposes, **settings)
    return {"LGFedAvg": {"v": v}}


if __name__ == "__main__":
    main(theirs)
