"""What a comparison of many small runs costs beside the training in them, in core-seconds.

    python -m benchmarks.many_runs > benchmarks/results/many_runs.md
    python -m benchmarks.many_runs 10 1      # ten seeds, --jobs 1 only

Six methods with the quick start's data, network and settings. Training is the time between a run's
first round and its last, evaluations included, by the clock of its process; the command is what the
operating system counts for it and its processes.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lightning.pytorch as pl
import yaml

from benchmarks.compare import machine

METHODS = ("FedAvg", "FedProx", "FedPer", "FedRep", "Ditto", "SCAFFOLD")
SPENT = "PFL_SPENT"  # environment variable: the file that collects what training takes


class Spent(pl.Callback):
    """Adds the process's seconds of each training to a file."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.begun = time.process_time()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = time.process_time() - self.begun

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with open(os.environ[SPENT], "a") as file:
            file.write(f"{self.seconds}\n")


def comparison(seeds: int) -> dict[str, object]:
    """The content of the comparison's file."""
    quickstart = yaml.safe_load(Path("configs/quickstart.yaml").read_text())
    del quickstart["trainer"]["name"], quickstart["seed_everything"]  # the comparison names both
    quickstart["trainer"]["callbacks"] = [{"class_path": "benchmarks.many_runs.Spent"}]
    arguments = quickstart["model"]["init_args"]
    kept = {key: arguments[key] for key in ("network", "lr", "local_epochs", "batch_size")}
    quickstart["model"] = {"init_args": kept}
    runs = {name: {"model": {"class_path": name}} for name in METHODS}
    return {"title": "Many runs", "seeds": seeds, "common": quickstart, "runs": runs}


def measure(seeds: int, *jobs: str) -> tuple[float, float, float]:
    """Wall seconds and core-seconds of the command, and core-seconds of the training in it."""
    with tempfile.TemporaryDirectory() as root:
        path, spent = Path(root, "many.yaml"), Path(root, "spent")
        path.write_text(yaml.safe_dump(comparison(seeds)))
        command = [sys.executable, "-m", "pfl", "compare", str(path), "--out", f"{root}/out", *jobs]
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, SPENT: str(spent)}
        )
        wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        cores = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return wall, cores, sum(map(float, spent.read_text().split()))


def main() -> None:
    seeds = int(sys.argv[1]) if sys.argv[1:] else 10
    print(f"{machine()}\n\n{len(METHODS) * seeds} runs of 100 rounds.\n")
    print("| --jobs | wall, s | command, core-s | training, core-s | command / training |")
    print("|---|---|---|---|---|")
    for number in sys.argv[2:] or ["1", ""]:
        wall, cores, training = measure(seeds, *(["--jobs", number] if number else []))
        print(
            f"| {number or 'default'} | {wall:.0f} | {cores:.0f} | {training:.0f} | "
            f"{cores / training:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
