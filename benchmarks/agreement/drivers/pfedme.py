"""CharlieDinh/pFedMe, the code of pFedMe's authors: whole runs of its servers and users.

Replaced are the reading of files, the draw of cohorts, the order of samples and the evaluation,
where the iterates are recorded.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    COHORTS,
    EVERYONE,
    RATE,
    ROUNDS,
    SIZES,
    Epochs,
    Iterates,
    Problem,
    absent,
    first_network,
    main,
    tensors,
    vector,
)


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of all methods."""
    sys.path.insert(0, str(checkout))
    absent("h5py", "utils", "utils.model_utils", "matplotlib.pyplot")
    users = importlib.import_module("FLAlgorithms.users.userbase")

    def run(name: str, kind: str, purpose: str, arguments: tuple[Any, ...]) -> Iterates:
        """The iterates of a server whose users take mini-batches of a purpose."""
        module = importlib.import_module(f"FLAlgorithms.servers.server{name}")
        pair = (first_network(problem.start), "Mclr_CrossEntropy")
        samples = [list(zip(*tensors(x, y), strict=True)) for x, y in _clients(problem)]
        reading: dict[str, Any] = dict(
            read_data=lambda dataset: [list(EVERYONE)],
            read_user_data=lambda i, data, dataset: (i, samples[i], samples[i]),
        )
        vars(module).update(reading)
        server = getattr(module, kind)("cpu", "", "", pair, 100, *arguments)
        rows: list[dict[str, np.ndarray]] = []
        v = np.tile(problem.start, (len(SIZES), 1))
        coming: dict[int, Iterator[Any]] = {}

        def begin() -> None:
            coming.clear()
            for i in EVERYONE:
                coming[i] = _batches(Epochs(problem, len(rows), i, [(purpose, 4)], tensors))
            type(server).send_parameters(server)

        def record(aggregate: Any) -> None:
            for i in COHORTS[len(rows)]:
                v[i] = vector(server.users[i].persionalized_model_bar)
            aggregate()
            rows.append({"w": vector(server.model.parameters()), "v": v.copy()})

        server.send_parameters = begin
        server.select_users = lambda now, number: [server.users[i] for i in COHORTS[len(rows)]]
        for aggregate in ("aggregate_parameters", "persionalized_aggregate_parameters"):
            original = getattr(server, aggregate)
            setattr(server, aggregate, lambda original=original: record(original))
        for skipped in ("evaluate", "evaluate_one_step", "evaluate_personalized_model"):
            setattr(server, skipped, lambda: None)
        server.save_results = server.save_model = lambda: None
        users.User.get_next_train_batch = lambda user: next(coming[user.id])
        server.train()
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    #            rate, beta, lamda, rounds, local steps, optimizer, users
    common = (RATE, 0.8, 2.0, ROUNDS, 4, "", 3)
    meta = (0.1, 0.3, 0.0, ROUNDS, 2, "", 3)
    return {
        "pFedMe": run("pFedMe", "pFedMe", "train", (*common, 3, 0.1, 0)),
        "FedAvg": run("avg", "FedAvg", "train", (*common, 0)),
        "PerFedAvg": run("peravg", "PerAvg", "full 4", (*meta, 0)),
    }


def _batches(epochs: Epochs) -> Iterator[Any]:
    while True:
        yield from epochs


def _clients(problem: Problem) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return zip(problem.inputs, problem.targets, strict=True)


if __name__ == "__main__":
    main(theirs)
