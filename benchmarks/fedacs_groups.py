"""The weights of FedACS's partners among planted groups, with the angles of both clients.

    pfl reproduce results/fedacs-groups results/fedacs-participants
    python -m benchmarks.fedacs_groups runs/reproduce/fedacs-groups
    python -m benchmarks.fedacs_groups runs/compare/tuned              # of the leaderboard

The rows go to docs/data/results/fedacs-groups-weights: those of the last round, and of earlier
ones for p = 0.75. fedacs-participants-shares has how much of all weight of others was inside of
the groups in the second half of the rounds. leaderboard/attention has this of three rounds at
the leaderboard's problem with groups, beside the share of all pairs.
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import published
from datamodules import ClientRotation, TensorDataModule
from pfl.experiments.grid import folder_name
from pfl.files import read_records

RUNS = ("no threshold", "p = 0", "p = 0.25", "p = 0.5", "p = 0.75", "p = 0.9")
PARTICIPANTS = [f"FedACS, p = {p}{end}" for p in (0.5, 0.75) for end in ("", ", all")]
EARLIER = (2, 3, 5, 10, 20)
ANGLES = {0: 0, 2: 90, 3: 180, 1: 270}  # where the upper left pixel of 2 x 2 is after the turn


def angles(seed: int, clients: int = 20) -> list[int]:
    """Returns the angle of each client, which depends on the seed and on the client alone."""
    corner = torch.tensor([1.0, 0, 0, 0]).view(1, 1, 2, 2).repeat(10 * clients, 1, 1, 1)
    data = TensorDataModule(
        corner,
        torch.zeros(len(corner)),
        num_clients=clients,
        transforms=[ClientRotation()],
        seed=seed,
    )
    seen = (next(iter(data.client(i).train_dataloader()))[0][0] for i in range(clients))
    return [ANGLES[int(image.argmax())] for image in seen]


def weights(folder: Path, run: str, place: str = "") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields each seed of a run, and the weight and the angles of each pair of two clients."""
    for path in sorted(folder.glob(f"{folder_name(run)}/{place}seed*/collaboration.csv")):
        seed, pairs = path.parent.name.removeprefix("seed"), []
        angle = angles(int(seed))
        for row in read_records(path):
            i, j = int(row["client"]), int(row["partner"])
            if i != j:
                pair = {"round": int(row["round"]), "client": i, "angle": angle[i]}
                pair |= {"partner": j, "partner_angle": angle[j]}
                pairs.append({**pair, "weight": float(row["weight"])})
        yield seed, pairs


def main(folder: Path) -> None:
    if (folder / "FedACS" / "problem=groups").is_dir():
        published.publish("results/leaderboard/attention", list(leaderboard(folder)))
        return
    rows: list[dict[str, Any]] = []
    for run in (f"FedACS, {name}" for name in RUNS):
        rounds = {40, *(EARLIER if run.endswith("0.75") else ())}
        for seed, pairs in weights(folder, run):
            of_rounds = (pair for pair in pairs if pair["round"] in rounds)
            what = {"run": run, "seed": seed}
            rows += [{**what, **p, "weight": f"{p['weight']:.6g}"} for p in of_rounds]
    published.publish("results/fedacs-groups-weights", rows)
    published.publish("results/fedacs-participants-shares", list(shares(folder)))


def shares(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the share of weight inside of the groups for each run of fedacs-participants."""
    for run, count in product(PARTICIPANTS, (5, 10, 20)):
        for seed, pairs in weights(folder, run, f"participants={count}/"):
            late = [pair for pair in pairs if pair["round"] > 400 // count]  # half of the rounds
            yield {"run": run, "participants": count, "seed": seed, "share": inside(late)}


def inside(pairs: list[dict[str, Any]]) -> str | None:
    """Returns how much of the weight is of clients with the same angle; None if there is none."""
    total = sum(pair["weight"] for pair in pairs)
    alike = sum(p["weight"] for p in pairs if p["angle"] == p["partner_angle"])
    return f"{alike / total:.6f}" if total else None


def leaderboard(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the share of weight, and that of pairs, inside of the groups by seed and round."""
    for seed, pairs in weights(folder, "FedACS", "problem=groups/"):
        angle = angles(int(seed))
        alike = sum(a == b for a, b in product(angle, angle)) - len(angle)
        of_pairs = f"{alike / (len(angle) * (len(angle) - 1)):.6f}"
        for number in (2, 10, 60):
            share = inside([pair for pair in pairs if pair["round"] == number])
            yield {"seed": seed, "round": number, "share": share, "pairs": of_pairs}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
