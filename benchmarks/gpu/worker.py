"""A process that does cases of one kind, one after another, since a GPU takes seconds to begin.

    python -m benchmarks.gpu.worker DEVICE SCRATCH SECONDS TINY

It reads a job as a line of JSON, and answers with one. What libraries print goes to the log.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import traceback
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import lightning
import numpy
import torch
import torchmetrics

from benchmarks.gpu import checks, hand_run, ours
from benchmarks.gpu.hand import NeedsGPU, TooSlow
from benchmarks.gpu.measuring import Kernels, distance, set_precision
from benchmarks.gpu.shapes import Shape, shape_of
from benchmarks.gpu.work import products, rate
from datamodules import TensorDataModule

Found = dict[str, Any]


class Worker:
    """Does jobs.

    Args:
        device: Where.
        scratch: The folder of weights and tasks, which the processes share.
        seconds: About how long the timed rounds of a case take.
        tiny: Whether shapes are small, for a rehearsal.
    """

    def __init__(self, device: torch.device, scratch: Path, seconds: float, tiny: bool) -> None:
        self.device = device
        self.scratch = scratch
        self.seconds = seconds
        self.tiny = tiny
        self._key = ""
        self._shape: Shape | None = None
        self._data: TensorDataModule | None = None
        self._rounds: hand_run.Rounds | None = None

    def do(self, job: Found) -> Found:
        """Returns what a job finds; `ok` says whether it is right."""
        what = job["do"]
        set_precision(job.get("precision", "fp32"))
        if what == "machine":
            return {"ok": True, **machine(self.device)}
        if what == "rate":
            dtype = torch.float32
            if job["precision"] == "bf16":
                dtype = torch.bfloat16
            return {"ok": True, "operations_s": rate(self.device, dtype)}
        if what == "check":
            return checks.run(job["check"], self.device)
        shape, data = self._load(job["shape"])
        if what == "task":
            return self._write_task(job, shape, data)
        if what == "evaluation":
            return {"ok": True, **ours.evaluation(shape, data, self.device, self.seconds)}
        if what == "ours":
            return {"ok": True, **self._ours(job, shape, data)}
        return {"ok": True, **self._hand(job, shape, data)}

    def _ours(self, job: Found, shape: Shape, data: TensorDataModule) -> Found:
        weights = None
        evaluate = job.get("evaluate", False)
        if job["engine"] == "auto" and not evaluate:
            weights = self._weights(job)
            weights.mkdir(parents=True, exist_ok=True)
        return ours.run(
            shape,
            data,
            self.device,
            precision=job["precision"],
            engine=job["engine"],
            evaluate=evaluate,
            seconds=self.seconds,
            weights=weights,
        )

    def _hand(self, job: Found, shape: Shape, data: TensorDataModule) -> Found:
        if self._rounds is None:
            self._rounds = hand_run.Rounds(shape, data, self.device)
        return hand_run.run(
            job["side"],
            self._rounds,
            precision=job["precision"],
            seconds=self.seconds,
            weights=self._weights(job),
        )

    def _write_task(self, job: Found, shape: Shape, data: TensorDataModule) -> Found:
        weights = self._weights({**job, "precision": "fp32"})
        saved = [int(path.stem) for path in weights.glob("*.pt")]
        total = max((mark for mark in saved if mark <= job["rounds"]), default=0)
        if total < 2:
            return {"ok": False, "error": "our own weights are missing"}
        made = ours.task(shape, data, job["shape"], total - 1)
        made.save(Path(job["file"]))
        moved = ours.moved(shape.make(), weights, total)
        of_round = [sum(len(made.owned[c]) for c in ids) for ids in made.cohorts[1:]]
        samples = shape.epochs * sum(of_round) / len(of_round)
        found = {"ok": True, "moved": moved, "parameters": made.parameters, "samples": samples}
        if shape.counted:
            found["work"] = products(shape.make(), shape.input)
        return found

    def _weights(self, job: Found) -> Path:
        return self.scratch / f"{job['shape']}-{job['precision']}"

    def _load(self, key: str) -> tuple[Shape, TensorDataModule]:
        """Returns a shape and its data, of which the last one's are kept."""
        if self._key != key or self._shape is None or self._data is None:
            self._rounds = None
            self._data = None
            self._shape = shape_of(key, self.tiny)
            self._data = self._shape.data()
            self._data.setup()
            self._key = key
        return self._shape, self._data


def machine(device: torch.device) -> Found:
    """Returns what the numbers are of."""
    found = {
        "device": "CPU",
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "torchmetrics": torchmetrics.__version__,
        "numpy": numpy.__version__,
        "date": date.today().isoformat(),
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["gpu_gib"] = round(torch.cuda.get_device_properties(device).total_memory / 2**30)
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def answer(worker: Worker, job: Found) -> tuple[Found, bool]:
    """Returns what a job finds, or how it failed, and whether the process can go on."""
    try:
        return worker.do(job), True
    except (NeedsGPU, TooSlow) as error:
        return {"ok": True, "skipped": str(error)}, True
    except Exception as error:
        lines = traceback.format_exc().strip().splitlines()
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        found["traceback"] = lines[-6:]
    try:
        if worker.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except RuntimeError:
        return found, False
    return found, True


def warm_up(device: torch.device) -> None:
    """Starts the GPU and the profiler, which takes seconds once."""
    a = torch.ones(64, 64, device=device)
    kernels = Kernels(device)
    kernels.start()
    distance(a @ a, a)
    kernels.stop()


def main() -> None:
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        device = torch.device("cuda", 0)
    worker = Worker(device, Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "tiny")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the log
    warnings.simplefilter("ignore")
    warm_up(device)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        found, goes_on = answer(worker, json.loads(line))
        print(json.dumps(found, default=str), file=answers, flush=True)
        if not goes_on:
            break


if __name__ == "__main__":
    main()
