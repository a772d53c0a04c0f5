"""PFLlib's column of Fashion-MNIST beside ours: the published data and the table of its page.

    pfl reproduce results/pfllib-fashion
    python -m benchmarks.pfllib runs/reproduce/pfllib-fashion    # the published data and the table
    python -m benchmarks.pfllib                                  # the table of the published data

A run of another number of rounds (`--change trainer.max_epochs=100`) is a row of its own. The data
have, for each client in each evaluated round of each run, how many of its test samples its model
has right. Rows that the folder does not have stay.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import published
from pfl.report.table import Table, markdown
from pfl.scores.names import ScoreName
from pfl.scores.runs import find_runs, read_runs

DATA = "results/pfllib-fashion/clients"
ROUNDS = 30  # of the file's runs
KINDS = ("personalized", "finetuned/100", "global")
PRINTED = {  # docs/benchmark.html of PFLlib's commit d832e76, Fashion-MNIST, practical
    "FedAvg": 85.85,
    "FedProx": 85.63,
    "FedGen": 84.90,
    "Per-FedAvg": 95.10,
    "pFedMe": 97.25,
    "Ditto": 97.47,
    "APFL": 97.25,
    "FedFomo": 97.21,
    "FedAMP": 97.20,
    "APPLE": 97.06,
    "FedALA": 97.66,
    "FedPer": 97.44,
    "FedRep": 97.56,
    "FedRoD": 97.52,
    "FedBABU": 97.46,
    "FedCP": 97.89,
    "GPFL": 97.81,
    "FedDBE": 97.69,
    "FedDistill": 97.43,
    "FedProto": 97.40,
}


def clients(folder: Path) -> Iterator[dict[str, object]]:
    """Yields a row for each client, round, finished run and kind of model."""
    for run in read_runs(find_runs([folder], "pfllib-fashion"), unfinished=True):
        if not run.finished:
            continue
        sizes = run.clients["test_samples"].astype(int).tolist()
        label = run.label
        rounds = int(run.rows[-1]["round"])
        if rounds != ROUNDS:
            label = f"{label}, {rounds} rounds"
        for row in run.rows:
            for kind in KINDS:
                accuracies = run.client_scores(row, ScoreName("test", kind, "accuracy"))
                if accuracies is None:
                    continue
                for client, samples in enumerate(sizes):
                    yield {
                        "run": label,
                        "model": kind,
                        "round": int(row["round"]),
                        "client": client,
                        "samples": samples,
                        "right": round(float(accuracies[client]) * samples),
                    }


def publish(rows: list[dict[str, object]]) -> None:
    """Publishes the rows of some runs beside those of the others."""
    new = {row["run"] for row in rows}
    old = []
    if DATA in published.names():
        old = [row for row in published.rows(DATA) if row["run"] not in new]
    published.publish(DATA, [*old, *rows])


def right_by_round() -> dict[tuple[str, str], np.ndarray]:
    """Returns which share of all test samples each client has right, [rounds, clients], in %.

    By run and kind of model; the sum over the clients is the pooled accuracy of a round.
    """
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    samples: dict[str, int] = {}  # of a client, the same in all runs
    for row in published.rows(DATA):
        rounds = found.setdefault((row["run"], row["model"]), {})
        rounds.setdefault(int(row["round"]), []).append(float(row["right"]))
        samples[row["client"]] = int(row["samples"])
    total = sum(samples.values())
    return {key: 100 * np.array(list(rounds.values())) / total for key, rounds in found.items()}


def chosen_by_others(right: np.ndarray) -> float:
    """Returns the pooled accuracy if the round is the best one of the other half of the clients.

    The halves are the clients with even and with odd numbers, so that no sample both chooses a
    round and counts in it.
    """
    halves = (right[:, 0::2], right[:, 1::2])
    score = 0.0
    for one, other in (halves, halves[::-1]):
        score += float(one[other.sum(1).argmax()].sum())
    return score


def table() -> Table:
    """Returns the page's table: what PFLlib prints, and three numbers of ours."""
    heads = ["", "PFLlib prints", "largest", "difference", "last round", "chosen by other clients"]
    rows = []
    found = right_by_round()
    for (run, kind), right in found.items():
        if kind == "global" and (run, "personalized") in found:
            continue  # PFLlib prints the personalized models
        pooled = right.sum(1)
        name = run
        if kind.startswith("finetuned"):
            name = f"{run} + fine-tuning"
        printed = PRINTED.get(name)
        cells = ["not in the table", f"{pooled.max():.2f}", ""]
        if printed is not None:
            cells = [f"{printed:.2f}", f"{pooled.max():.2f}", f"{pooled.max() - printed:+.2f}"]
        rows.append([name, *cells, f"{pooled[-1]:.2f}", f"{chosen_by_others(right):.2f}"])
    return Table(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="the folder of the runs")
    folder = parser.parse_args().folder
    if folder is not None:
        publish(list(clients(folder)))
    print(markdown(table()))


if __name__ == "__main__":
    main()
