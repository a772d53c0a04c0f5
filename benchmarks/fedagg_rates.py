"""Why FedAgg diverges: each client's rate and gradient in the rounds before the end.

    python -m benchmarks.fedagg_rates    # two runs of FedAgg again, to the round that diverges

For each client and epoch of a round: the rate, and the norm of the sum of the gradients of the
epoch's batches. FedAgg's own `rates.csv` ends with the last whole round.
"""

import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks import published
from pfl.algorithms import FedAgg
from pfl.experiments.jobs import execute
from pfl.experiments.reproduction import Reproduction
from pfl.method import Clients

DATA = "results/fedagg-diverged/rates"
RUNS = {"results/fedagg-cifar": "IID", "results/fedagg-letters": "Dirichlet 0.6"}
KEPT = 2  # rounds before the end


class Traced(FedAgg):
    """FedAgg that notes the rates and the gradients of all clients and epochs."""

    notes: list[dict[str, Any]] = []  # noqa: RUF012

    def _epoch(self, clients: Clients, v: Tensor, rate: Tensor, epoch: int) -> Tensor:
        summed = super()._epoch(clients, v, rate, epoch)
        norms = summed.norm(dim=1).tolist()
        for client, own, norm in zip(clients.ids.tolist(), rate[:, 0].tolist(), norms, strict=True):
            note = {"round": self.rounds + 1, "epoch": epoch, "client": client}
            self.notes.append(note | {"rate": f"{own:.6f}", "gradient": f"{norm:.6g}"})
        return summed


def main() -> None:
    rows = []
    for name, partition in RUNS.items():
        Traced.notes.clear()
        for job in Reproduction.from_file(name).jobs():
            if job.run == "FedAgg" and job.axes.get("partition", "IID") == partition:
                model = {**job.config["model"], "class_path": "benchmarks.fedagg_rates.Traced"}
                with tempfile.TemporaryDirectory() as folder:
                    execute(job.with_changes([{"model": model}]), Path(folder))
        last = Traced.notes[-1]["round"]
        rows += [{"file": name} | note for note in Traced.notes if note["round"] > last - KEPT]
    published.publish(DATA, rows)


if __name__ == "__main__":
    # The runs import their class from this module by its name, which is not "__main__".
    from benchmarks import fedagg_rates

    fedagg_rates.main()
