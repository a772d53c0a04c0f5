"""FedSLR's Figures 3 and 4 in numbers: clients beside FedAvg, and pairs of models' parts.

    pfl reproduce results/fedslr-clients
    python -m benchmarks.fedslr_clients runs/reproduce/fedslr-table1

Both files are in docs/data/results/fedslr-clients.
"""
# mypy: disable-error-code="override"

import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer

from benchmarks import published
from pfl.algorithms import FederatedAlgorithm
from pfl.callbacks.embedding import embeddings
from pfl.callbacks.recorder import RunRecorder
from pfl.files import read_records, write_records
from pfl.scores.runs import Run

DATA = "results/fedslr-clients"
PAIRS = "pairs.csv"
METHODS = ("FedAvg", "FedSLR", "FedPer", "FedRep", "Ditto", "APFL", "LocalTrain", "FedSpa")


class PairAccuracy(Callback):
    """Writes each client's test accuracy with the extractor and the classifier of either model."""

    def on_train_end(self, trainer: Trainer, pl_module: FederatedAlgorithm) -> None:
        rows, loop = [], pl_module.run.loop
        with torch.no_grad(), pl_module.in_full_precision():
            for client in range(loop.num_clients):
                panels, targets = embeddings(pl_module, loop, client)
                for (extractor, classifier), (_, found) in panels.items():
                    what = {"client": client, "extractor": extractor, "classifier": classifier}
                    rows.append({**what, "accuracy": f"{(found == targets).mean():.6f}"})
        write_records(RunRecorder.of(trainer).folder / PAIRS, rows)


def main(folder: Path) -> None:
    clients, pairs = [], []
    for method in METHODS:
        for path in sorted(folder.glob(f"{method}/digits=non-IID/seed?")):
            what = {"run": method, "seed": path.name.removeprefix("seed")}
            columns = Run.read(method, 0, path).clients
            model = "global" if method == "FedAvg" else "personalized"
            for client, score in enumerate(columns[f"test/{model}/accuracy"]):
                clients.append({**what, "client": client, "accuracy": f"{score:.6f}"})
            if method == "FedSLR":
                pairs += [{"seed": what["seed"], **row} for row in read_records(path / PAIRS)]
    published.publish(f"{DATA}/clients", clients)
    published.publish(f"{DATA}/pairs", pairs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
