"""A round of FedAvg with privacy, and with robust rules, beside a plain one.

    python -m benchmarks.aggregation > benchmarks/results/aggregation.md
    python -m benchmarks.aggregation W1 --turns 1    # only this

Times are CPU times of all threads, since the machine may have other work. Each run is compared with
a plain one right before it. Sample-level privacy computes the gradient of
every sample by itself, which is another amount of work; it stands there for its size.
"""

import argparse
import statistics
import time
from typing import Any

from benchmarks.clock import heading, seconds_of, stamps_of
from benchmarks.workloads import BATCH, RATE, WORKLOADS, Workload
from pfl import FederatedLoop
from pfl.aggregation.privacy import AdaptiveClip, Privacy, SamplePrivacy
from pfl.aggregation.robust import GeometricMedian, Krum, Median, NormBound
from pfl.algorithms import FedAvg

NOISE: dict[str, Any] = {"clip": 1.0, "noise_multiplier": 1.0}
LOOPS: dict[str, dict[str, Any]] = {
    "client-level privacy": {"privacy": Privacy(**NOISE)},
    "the same, adaptive clip": {"privacy": Privacy(**NOISE, adaptive=AdaptiveClip())},
    "norm bound": {"aggregation": NormBound(1.0)},
    "median": {"aggregation": Median()},
    "geometric median": {"aggregation": GeometricMedian()},
    "Krum": {"aggregation": Krum(3)},
    "sample-level privacy": {"sample_privacy": SamplePrivacy(**NOISE)},
}


def milliseconds(workload: Workload, loop: dict[str, Any]) -> float:
    """Median CPU time of a round but the first."""
    method = FedAvg(workload.make(), lr=RATE, local_epochs=workload.epochs, batch_size=BATCH)
    cohorts = FederatedLoop(workload.data(), clients_per_round=workload.per_round, **loop)
    stamps = stamps_of(method, cohorts, workload.rounds + 1, now=time.process_time)
    return 1000 * statistics.median(seconds_of(stamps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    print(heading(args.turns))
    print("| workload | round | CPU milliseconds | plain | ratio |")
    print("|---|---|---|---|---|")
    for key in args.workloads or ["W1", "W2", "W3"]:
        for name, loop in LOOPS.items():
            turns = args.turns if "sample" not in name else 1
            pairs = [
                (milliseconds(WORKLOADS[key], {}), milliseconds(WORKLOADS[key], loop))
                for _ in range(turns)
            ]
            ratio = statistics.median(with_it / plain for plain, with_it in pairs)
            plain, with_it = map(statistics.median, zip(*pairs, strict=True))
            print(f"| {key} | {name} | {with_it:.1f} | {plain:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
