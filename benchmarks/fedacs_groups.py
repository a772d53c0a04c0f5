"""The weights of FedACS's partners among planted groups, with the angles of both clients.

    pfl reproduce results/fedacs-groups results/fedacs-participants
    python -m benchmarks.fedacs_groups runs/reproduce/fedacs-groups

The rows go to docs/data/results/fedacs-groups-weights.csv: those of the last round, and of earlier
ones for p = 0.75. fedacs-participants-shares.csv has how much of all weight of others was inside of
the groups in the second half of the rounds.
"""

import csv
import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from datamodules import ClientRotation, TensorDataModule
from pfl.files import write_records

DATA = Path("docs/data/results")
RUNS = ("no threshold", "p = 0", "p = 0.25", "p = 0.5", "p = 0.75", "p = 0.9")
PARTICIPANTS = [f"FedACS, p = {p}{end}" for p in (0.5, 0.75) for end in ("", ", all")]
EARLIER = ("2", "3", "5", "10", "20")
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


def main(folder: Path) -> None:
    rows: list[dict[str, object]] = []
    for run in (f"FedACS, {name}" for name in RUNS):
        name = re.sub(r"[^\w.=]+", "-", run)
        for path in sorted(folder.glob(f"{name}/seed*/collaboration.csv")):
            seed = path.parent.name.removeprefix("seed")
            angle = angles(int(seed))
            for row in csv.DictReader(path.open()):
                i, j = int(row["client"]), int(row["partner"])
                if i != j and row["round"] in ("40", *(EARLIER if run.endswith("0.75") else ())):
                    what = {"run": run, "seed": seed, "round": row["round"], "client": i}
                    pair = {"angle": angle[i], "partner": j, "partner_angle": angle[j]}
                    rows.append({**what, **pair, "weight": f"{float(row['weight']):.6g}"})
    write_records(DATA / "fedacs-groups-weights.csv", rows)
    write_records(DATA / "fedacs-participants-shares.csv", list(shares(folder)))


def shares(folder: Path) -> Iterator[dict[str, object]]:
    """Yields the share of weight inside of the groups for each run of fedacs-participants."""
    for run, count in product(PARTICIPANTS, (5, 10, 20)):
        name = re.sub(r"[^\w.=]+", "-", run)
        for path in sorted(folder.glob(f"{name}/participants={count}/seed*/collaboration.csv")):
            seed = path.parent.name.removeprefix("seed")
            angle, table = angles(int(seed)), list(csv.DictReader(path.open()))
            begin = 400 // count  # half of the rounds
            inside, total = 0.0, 0.0
            for row in table:
                i, j = int(row["client"]), int(row["partner"])
                if i != j and int(row["round"]) > begin:
                    total += float(row["weight"])
                    inside += float(row["weight"]) * (angle[i] == angle[j])
            share = f"{inside / total:.6f}" if total else None
            yield {"run": run, "participants": count, "seed": seed, "share": share}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
