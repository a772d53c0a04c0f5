"""Rounds on a GPU: the workloads, pfl-research's CIFAR-10 protocol, and FedSLR on ResNet-18.

    python -m benchmarks.gpu > benchmarks/results/gpu.md
    python -m benchmarks.gpu --device cpu W1 W2     # the same on a CPU, only these

Each in 32-true and in bf16-mixed: the time of a round, images a second, the most memory, the
training loss (equal work), and the share of the device's measured matrix-product rate that the
layers' products reach. Data, sampling and state are on the device; nothing is evaluated.
"""

import argparse
import dataclasses
import gc
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

from benchmarks.clock import seconds_of, stamps_of
from benchmarks.workloads import BATCH, RATE, WORKLOADS, Workload
from pfl.algorithms import FedAvg, FedSLR

# Song et al., "pfl-research", NeurIPS 2024: 1,000 clients with 50 samples, 50 of them a round, one
# epoch in batches of 10; its network has two convolutions.
CIFAR = Workload(
    "pfl-research's CIFAR-10 protocol",
    "CNN",
    {"in_channels": 3, "image_size": 32, "kernel_size": 3},
    rounds=10,
    repetitions=1,
    shape=(3, 32, 32),
    clients=1000,
    per_round=50,
    samples=50,
    epochs=1,
)
SLR = dataclasses.replace(WORKLOADS["W5"], title="FedSLR on ResNet-18", rounds=3)
CASES: dict[str, tuple[Workload, type[FedAvg] | type[FedSLR], int]] = {
    **{key: (workload, FedAvg, BATCH) for key, workload in WORKLOADS.items()},
    "CIFAR": (CIFAR, FedAvg, 10),
    "FedSLR": (SLR, FedSLR, BATCH),
}


def products(network: nn.Module, shape: tuple[int, ...]) -> int:
    """Multiplications and additions of the layers' products in one training step of one sample.

    Twice as many for the derivatives by weights and by inputs as forward, less the first layer's.
    """
    counts: list[int] = []

    def count(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        places = output[0].numel() // len(weight)
        counts.append(2 * places * weight.numel())

    layers = [m for m in network.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        network(torch.zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    return 3 * sum(counts) - counts[0]


def rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product, the best of several."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    clock = Timer("a @ b", globals={"a": a, "b": b})
    return 2 * size**3 / min(clock.timeit(5).mean for _ in range(3))


def measure(key: str, device: torch.device, precision: Any) -> dict[str, float]:
    """Median seconds of a round, and what else the table shows."""
    workload, method, batch = CASES[key]
    network = workload.make()
    work = products(network, workload.shape)
    on_gpu = device.type == "cuda"
    if on_gpu:
        gc.collect()  # a Trainer is in cycles: the last case would count as memory of this one
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    algorithm = method(network, lr=RATE, local_epochs=workload.epochs, batch_size=batch)
    settings = {"accelerator": device.type, "precision": precision}
    stamps = stamps_of(algorithm, workload.loop(), workload.rounds + 1, **settings)
    samples = algorithm.samples_seen / (workload.rounds + 1)
    seconds = statistics.median(seconds_of(stamps))
    return {
        "seconds": seconds,
        "images": samples / seconds,
        "operations": samples * work / seconds,
        "memory": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan"),
        "loss": algorithm.row["train/loss"],
    }


def lines(keys: list[str], device: torch.device) -> Iterator[str]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    yield f"PyTorch {torch.__version__}, {name}\n"
    yield "| workload | precision | round, ms | images / s | share of the rate | GiB | loss |"
    yield "|---|---|---|---|---|---|---|"
    for precision, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)):
        limit = rate(device, dtype)
        for key in keys:
            found = measure(key, device, precision)
            yield (
                f"| {key}: {CASES[key][0].title} | {precision} | {1000 * found['seconds']:.1f} | "
                f"{found['images']:,.0f} | {found['operations'] / limit:.1%} | "
                f"{found['memory']:.2f} | {found['loss']:.4f} |"
            )
        yield f"| a large matrix product | {precision} | | | {limit / 1e12:.2f} TFLOP/s | | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    if unknown := set(args.workloads) - set(CASES):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(CASES)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu runs the same on the CPU")
    torch.backends.cudnn.allow_tf32 = False  # as matrix products: 32-true is compared with float32
    for line in lines(args.workloads or list(CASES), torch.device(args.device)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
