"""Times, kernels and memory of rounds, and the settings of a precision."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

FIRST_ROUNDS = 2  # before the rounds that are timed
MARKS = (1, 2, 3, 5, 9, 17, 33)  # numbers of rounds after which weights are kept and compared
MOST = MARKS[-1] - FIRST_ROUNDS
PROFILED = 3.0  # seconds: a longer round is not profiled
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed"}


def set_precision(precision: str) -> None:
    """Switches TF32 on or off, of matrix products and of convolutions."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def synchronize(device: torch.device) -> None:
    """Waits for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def planned(seconds: float, each: float) -> int:
    """Returns how many rounds are timed if one takes `each` seconds."""
    least = 2
    if each > seconds:
        least = 1
    return max(least, min(MOST, round(seconds / max(each, 1e-6))))


class Memory:
    """The most memory that is taken from its creation on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with suppress(OSError):  # the kernel then counts the peak anew
            Path("/proc/self/clear_refs").write_text("5")
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)

    def peak(self) -> dict[str, float]:
        """Returns MiB of the host and of the GPU."""
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        with suppress(OSError):
            status = Path("/proc/self/status").read_text()
            found = re.search(r"VmHWM:\s+(\d+) kB", status)
            if found:
                host = int(found[1]) / 1024
        result = {"host_mib": host}
        if self.device.type == "cuda":
            result["gpu_mib"] = torch.cuda.max_memory_allocated(self.device) / 2**20
            result["gpu_reserved_mib"] = torch.cuda.max_memory_reserved(self.device) / 2**20
        return result


class Kernels:
    """Counts the kernels between `start` and `stop`; on a CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.profiler: Any = None

    def start(self) -> None:
        if self.device.type == "cuda":
            synchronize(self.device)
            self.profiler = profile(activities=[ProfilerActivity.CUDA])
            self.profiler.start()

    def stop(self) -> None:
        if self.profiler is not None:
            synchronize(self.device)
            self.profiler.stop()

    def found(self, round_seconds: float) -> dict[str, Any]:
        """Returns numbers of kernels and launches, and the share of the time that the card works.

        The time is that of a round without the profiler.
        """
        if self.profiler is None:
            return {}
        spans = []
        launches = 0
        kernels = 0
        for event in self.profiler.profiler.kineto_results.events():
            name = event.name()
            if event.device_type() == torch.autograd.DeviceType.CUDA:
                if not name.startswith(("Memcpy", "Memset")):
                    kernels += 1
                begin = event.start_ns()
                spans.append((begin, begin + event.duration_ns()))
            elif name.startswith(LAUNCHES):
                launches += 1
        self.profiler = None
        busy = union(spans) / 1e9
        return {
            "kernels": kernels,
            "launches": launches,
            "busy_ms": 1000 * busy,
            "busy": min(1.0, busy / round_seconds),
        }


def union(spans: Sequence[tuple[int, int]]) -> int:
    """Returns the length of what intervals cover together."""
    covered = 0
    reached = 0
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def launch_microseconds(device: torch.device) -> float | None:
    """Returns how long a small kernel takes: longer where a profiler still listens."""
    if device.type != "cuda":
        return None
    x = torch.zeros(1, device=device)
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(500):
        x.add_(1)
    synchronize(device)
    return (time.perf_counter() - begun) / 500 * 1e6


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns |one - other| / |other| of two tensors, in float64 on the CPU."""
    a = one.detach().double().cpu().flatten()
    b = other.detach().double().cpu().flatten()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
