"""Publishes FedACS's Table 1 and Figure 1 on Fashion-MNIST: rows of a tuning and its comparison.

    pfl tune results/fedacs-fashion
    pfl compare runs/tune/fedacs-fashion/tuned.yaml \
        --change data.init_args.protocol.init_args.validation=0.0
    python -m benchmarks.fedacs_fashion runs/tune/fedacs-fashion runs/compare/tuned

Published rows of settings that these folders do not have stay.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import published
from pfl.files import read_records

DATA = "results/fedacs-fashion"
SCORES = ("test/personalized/accuracy", "test/global/accuracy")
Row = dict[str, str]


def runs(rows: list[Row]) -> Iterator[Row]:
    """Yields each run in the round that counts: without validation samples the last one."""
    for row in rows:
        what = {"run": row["method"], "setting": row["setting"], "seed": row["seed"]}
        what["diverged"] = str(int(row["status"] == "diverged"))
        what["round"] = f"{float(row['round']):g}"
        for name in SCORES:
            what[name] = f"{float(row[name]):.6f}".rstrip("0") if row[name] else ""
        yield what


def publish(name: str, rows: list[Row]) -> None:
    settings = {row["setting"] for row in rows}
    others = [row for row in published.rows(f"{DATA}/{name}") if row["setting"] not in settings]
    published.publish(f"{DATA}/{name}", others + rows)


def main(tuned: Path, compared: Path) -> None:
    publish("trials", read_records(tuned / "trials.csv"))
    publish("runs", list(runs(read_records(compared / "runs.csv"))))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
