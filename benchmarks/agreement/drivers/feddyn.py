"""alpemreacar/FedDyn, the code of FedDyn's authors: whole runs of its training functions.

Their files fix float32, which is read as float64 here. Batches are full, since the functions make
shuffled loaders themselves. Cohorts are given through the draw of random numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    CLASSES,
    EPOCHS,
    FEATURES,
    HIDDEN,
    RATE,
    ROUNDS,
    SIZES,
    Iterates,
    Problem,
    absent,
    drawn_cohorts,
    import_in_float64,
    main,
)


def network(start: np.ndarray) -> nn.Module:
    made = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    nn.utils.vector_to_parameters(torch.tensor(start), made.parameters())
    return made


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of all methods."""
    torch.set_default_dtype(torch.float64)
    import_in_float64(checkout)
    absent("matplotlib.pyplot")
    methods = importlib.import_module("utils_methods")
    inputs, targets = problem.inputs, [y.reshape(-1, 1) for y in problem.targets]
    data = SimpleNamespace(
        name="problem",
        dataset="synt",
        n_client=len(SIZES),
        clnt_x=inputs,
        clnt_y=targets,
        tst_x=np.concatenate(inputs),
        tst_y=np.concatenate(targets),
    )
    shared = dict(
        data_obj=data,
        act_prob=0.5,
        learning_rate=RATE,
        batch_size=max(SIZES),
        com_amount=ROUNDS,
        print_per=1000,
        weight_decay=0.0,
        model_func=lambda: network(problem.start),
        init_model=network(problem.start),
        save_period=1,
        lr_decay_per_round=1.0,
    )

    def run(name: str, model: int = 0, **settings: float) -> Iterates:
        """The iterates of a function, which returns its models of all rounds at a position."""
        vars(np.random)["uniform"] = drawn_cohorts()
        function = getattr(methods, f"train_{name}")
        with contextlib.redirect_stdout(None):
            models = function(**shared, **settings)[model]
        vectors = [nn.utils.parameters_to_vector(m.parameters()).detach().numpy() for m in models]
        return {"w": np.stack(vectors)}

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # they write there
        Path("Output/problem").mkdir(parents=True)
        return {
            "FedAvg": run("FedAvg", epoch=EPOCHS),
            "FedProx": run("FedProx", epoch=EPOCHS, mu=0.3),
            "FedDyn": run("FedDyn", model=6, epoch=EPOCHS, alpha_coef=0.4),
            "SCAFFOLD": run("SCAFFOLD", n_minibatch=EPOCHS),
        }


if __name__ == "__main__":
    main(theirs)
