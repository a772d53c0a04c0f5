"""jhoon-oh/FedBABU, the code of FedBABU's authors: its script, as `scripts.py` says."""

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
    """The iterates of FedBABU: all clients have the same model."""

    def models(networks: list[nn.Module], *args: Any, **kwargs: Any) -> np.ndarray:
        return of_networks(networks)

    settings: dict[str, Any] = dict(
        local_ep=EPOCHS,
        local_upt_part="body",
        aggr_part="body",
        server_data_ratio=0.0,
        unbalanced=False,
        momentum=0.9,
        wd=0.001,
    )
    purposes = [("train", EPOCHS)]
    v = run_script(problem, checkout, "main_fed.py", models, purposes, **settings)
    return {"FedBABU": {"w": v[:, 0], "v": v}}


if __name__ == "__main__":
    main(theirs)
