"""The engines: what each of them earns, in one table.

    python -m benchmarks.engines > benchmarks/results/engines.md

Rows of a CPU are measured here: a local step of 10 clients, in turn in one process with one thread.
Seconds are those of the processor, which other processes change less than they change time. Rows of
networks by tiles come from `benchmarks/results/convolutions.md`, and those of a GPU from the lines
of `python -m benchmarks.gpu`, where a run's first choice between engines was timed.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.clock import medians
from benchmarks.compare import machine
from models import CNN, MLP, LeNet5, LogisticRegression, SmallCNN
from models.adapters import LoRA, train_only
from pfl.engines import Oracle
from pfl.engines.batch import Batch, StepBlock, default_loss
from pfl.engines.local_step import Step
from pfl.parameters import ParameterSpace

CLIENTS, STEPS, REPEATS = 10, 5, 7
RESULTS = Path(__file__).parent / "results"
VMAP = "pfl.engines.vmap.VmapEngine"  # `vmap` takes chains of linear layers as well
ENOUGH = 1.2
ENGINES = ("chain", "shared body", "tiles", "matrix products", "unrolled")
HEAD = """| workload | where | plain, ms | `vmap` | {} |
|---|---|---:|---:|---:|---:|---:|---:|---:|"""

LEGEND = """A number says how many times as fast an engine is, and is bold from 1.2 on. Those of
`vmap` are beside `sequential`. The others are beside the plain engine, which a run would have
without them, and whose time of a local step of all clients is in the third column: on a CPU
`vmap`, for networks with convolutions `sequential`; on a GPU the recorded `vmap`, as all but
`sequential` are recorded there. `vmap` is that engine itself, not a chain, which `model.engine:
vmap` takes, too."""


class Texts(nn.Module):
    """A small transformer of tokens [n, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.blocks(self.embedding(tokens)).mean(1))
        return outputs


def adapted() -> nn.Module:
    """The transformer, of which low-rank factors and the head are trained."""
    network = Texts()
    train_only(network, LoRA(8, 16, ["linear1", "linear2"]))
    return network


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "logistic 784-10": (lambda: LogisticRegression(784, 10), (784,), 20),
    "MLP 784-200-10": (lambda: MLP(784, (200,), 10), (784,), 20),
    "SmallCNN 8x8": (SmallCNN, (1, 8, 8), 20),
    "LeNet-5 28x28": (LeNet5, (1, 28, 28), 20),
    "CNN 28x28": (CNN, (1, 28, 28), 20),
    "LoRA of a transformer, batches of 2": (adapted, (32,), 2),
    "LoRA of a transformer, batches of 8": (adapted, (32,), 8),
}


def milliseconds(network: nn.Module, shape: tuple[int, ...], samples: int) -> dict[str, float]:
    """The time of a step of all clients by the names of `sequential`, vmap and what `auto` takes.

    `auto` is left out where it takes one of the others.
    """
    space = ParameterSpace(network)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(CLIENTS, samples, *shape, generator=generator)
    if isinstance(network, Texts):
        inputs = torch.randint(1000, inputs.shape, generator=generator)
    targets = torch.randint(10, (CLIENTS, samples), generator=generator)
    w = space.vector.detach().repeat(CLIENTS, 1)
    blocks = [StepBlock.of(Batch(inputs, targets, [samples] * CLIENTS), w.dtype)] * STEPS
    runs: dict[str, Callable[[], object]] = {}
    for asked in ("sequential", VMAP, "auto"):
        oracle = Oracle(network, space, default_loss, asked)
        oracle.inspect(inputs[0], targets[0])
        name = oracle.engine.name
        runs.setdefault(name, partial(oracle.descend, w, blocks, Step(1e-6)))
    found = medians(runs, REPEATS, time.process_time)
    return {name: ms / STEPS for name, ms in found.items()}


def row(workload: str, where: str, plain: float, ratios: dict[str, float]) -> str:
    """A row of the table: the time of the plain engine, and how many times as fast others are."""
    time_of_plain = f"{plain:.3g}"
    if plain >= 100:
        time_of_plain = f"{plain:.0f}"
    cells = [workload, where, time_of_plain]
    for engine in ("vmap", *ENGINES):
        cell = ""
        if engine in ratios:
            cell = f"{ratios[engine]:.2f}"
            if ratios[engine] >= ENOUGH:
                cell = f"**{cell}**"
        cells.append(cell)
    return f"| {' | '.join(cells)} |"


def measured() -> Iterator[str]:
    """The rows that are measured here."""
    for workload, (make, shape, samples) in NETWORKS.items():
        torch.manual_seed(0)
        network = make()
        ms = milliseconds(network, shape, samples)
        convolves = any(isinstance(m, nn.Conv2d) for m in network.modules())
        plain = ms["vmap"]
        if convolves:
            plain = ms["sequential"]
        ratios = {name.split()[-1]: plain / t for name, t in ms.items()}
        ratios["vmap"] = ms["sequential"] / ms["vmap"]
        if "body" in ratios:
            ratios["shared body"] = ratios["body"]
        yield row(workload, "CPU", plain, ratios)


def by_tiles() -> Iterator[str]:
    """The rows of networks in `convolutions.md`."""
    text = (RESULTS / "convolutions.md").read_text()
    for network, n, directly, _, ratio in re.findall(
        r"^\| (\w+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \|$", text, re.M
    ):
        yield row(f"{network}, batches of {n}", "CPU", float(directly), {"tiles": float(ratio)})


def on_gpu() -> Iterator[str]:
    """The rows of a GPU, on which all engines but `sequential` are recorded."""
    lines = (RESULTS / "data" / "gpu-h100.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        if "timed" not in line:
            continue
        timed = {name.split(" of ", 1)[-1]: ms for name, ms in line["timed"].items()}
        plain = timed["vmap"]
        names = {
            "chain": "compiled chain",
            "matrix products": "vmap of matrix products",
            **{name: name for name in ("shared body", "unrolled")},
        }
        ratios = {k: plain / timed[name] for k, name in names.items() if name in timed}
        ratios["vmap"] = timed["sequential"] / plain
        case, precision, side = line["case"].split("/")
        workload = f"{case}, {precision}{side.removeprefix('ours').replace('-', ', ')}"
        yield row(workload, "GPU", plain, ratios)


def main() -> None:
    torch.set_num_threads(1)
    print("# What each engine earns\n")
    print(HEAD.format(" | ".join(ENGINES)))
    for rows in (measured, by_tiles, on_gpu):
        for line in rows():
            print(line, flush=True)
    print(f"\n{LEGEND}\n")
    print(f"Measured here: PyTorch {torch.__version__}, one thread; {machine()}")


if __name__ == "__main__":
    main()
