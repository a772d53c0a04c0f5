"""How often `pfl search` is right: searches with planted variants, luck alone or a true gain.

    python -m benchmarks.search --searches 1000        # drawn scores, the harness's own decisions
    python -m benchmarks.search --real 5               # a few searches whose tries are real runs

A drawn search tries twenty versions and then asks for a verdict. In searches of luck no version is
better than the baseline; in the others one of them, at a random place, is better by two points
(0.02), and the others are not. Scores of a seed share what the seed makes easy or hard; the gain of
a version has the standard deviation of the row.

A real search trains a multilayer perceptron on scikit-learn's digits. Each of its five versions
draws the initial network anew, which is luck alone; the fourth one of a search with a gain has a
larger learning rate, too.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pfl.errors import ConfigError
from pfl.experiments.search import CHOSEN, VERDICTS, Rules, Scores, Search
from pfl.scores.statistics import seeds_to_choose

GAIN = 0.02
EASE = 0.03  # the deviation of what all methods share under one seed
DEVIATIONS = (0.01, 0.02, 0.03)
METHOD = """from torch import nn

from pfl.algorithms import FedAvg
from pfl.method import Network


class Mine(FedAvg):
    def __init__(self, network: Network, lr: float = 0.1, **kwargs):
        for layer in [one for one in network.modules() if isinstance(one, nn.Linear)] * DRAWS:
            layer.reset_parameters()
        super().__init__(network, lr=lr * FACTOR, **kwargs)
"""


@dataclass(frozen=True, kw_only=True)
class Planted(Search):
    """A search whose scores are drawn.

    Args:
        number: The number of the search, from which all draws follow.
        effects: By how much each version is better than the baseline.
        deviation: The standard deviation of a version's gain over the seeds.
        tail: Degrees of freedom of the noise, which is Student's t; None: normal.
        now: The version that the file has, in a list.
    """

    number: int
    effects: list[float]
    deviation: float
    tail: int | None = None
    now: list[int] = field(default_factory=lambda: [0])

    def version(self) -> str:
        return f"version {self.now[0]}"

    def keep_version(self, root: Path, number: int) -> Path:
        return root / str(number)

    def source_file(self) -> Path:
        return Path("mine.py")

    def draw(self, number: int, used: set[int]) -> list[int]:
        first = max(used, default=1000) + 1  # the scores of a seed are drawn when it is asked for
        return [*range(first, first + number)]

    def measure(
        self, run: str, seeds: list[int], root: Path, jobs: int | None, split: str
    ) -> Scores:
        which = 0
        effect = 0.0
        if run == self.candidate:
            which = 1 + self.now[0]
            effect = self.effects[self.now[0]]
        values = []
        for seed in seeds:
            shared = np.random.default_rng([self.number, seed]).normal(0.0, EASE)
            key = [self.number, seed, which, split == "test"]
            values.append(0.85 + shared + effect + self.noise(np.random.default_rng(key)))
        return Scores(f"{split}/personalized/accuracy", np.array(values))

    def noise(self, generator: np.random.Generator) -> float:
        """Returns the noise of one run; the difference of two has the deviation `deviation`."""
        scale = self.deviation / np.sqrt(2)
        if self.tail is None:
            return float(generator.normal(0.0, scale))
        unit = np.sqrt(self.tail / (self.tail - 2))
        return float(generator.standard_t(self.tail) * scale / unit)


def drawn_verdict(
    number: int,
    gain: float,
    deviation: float,
    *,
    tries: int = 20,
    looks: int = 1,
    tail: int | None = None,
) -> str:
    """Returns how a drawn search ends: "improves" if one of its looks says so, else the last.

    Half of the tries come before each of two looks.
    """
    effects = [0.0] * tries
    effects[np.random.default_rng([number, 7]).integers(tries)] = gain
    search = Planted(
        common={"model.init_args.lr": 0.1},
        runs={"FedAvg": {"model.class_path": "FedAvg"}, "Mine": {"model.class_path": "mine.Mine"}},
        seeds=max(2, seeds_to_choose(GAIN, deviation / np.sqrt(2), tries, CHOSEN, 40)),
        search=Rules(tries=tries, looks=looks),
        number=number,
        effects=effects,
        deviation=deviation,
        tail=tail,
    )
    ends = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for version in range(tries):
            search.now[0] = version
            best = search.attempt(root)["best"]
            if (version + 1) % (tries // looks) == 0:
                search.now[0] = best - 1
                try:
                    ends.append(search.judge(root)["verdict"])
                except ConfigError:  # the best one has been judged
                    continue
    if VERDICTS[1] in ends:
        return VERDICTS[1]
    return ends[-1]


def real_verdict(number: int, factor: float) -> dict[str, Any]:
    """Returns the record of the look of a search with real runs, whose seeds are the system's.

    The fourth of five versions multiplies the learning rate by `factor`.
    """
    content = {
        "seeds": [*range(100 * number, 100 * number + 4)],
        "search": {"tries": 5},
        "common": {
            "trainer": {"max_epochs": 5, "accelerator": "cpu"},
            "model.init_args": {
                "network": {"class_path": "MLP", "init_args": {"in_features": 64}},
                "lr": 0.1,
                "batch_size": 20,
            },
            "data": {
                "class_path": "DigitsDataModule",
                "init_args": {
                    "num_clients": 10,
                    "partition": {"class_path": "Dirichlet", "init_args": {"alpha": 0.5}},
                    "protocol": {"class_path": "SplitOwn", "init_args": {"validation": 0.2}},
                },
            },
        },
        "runs": {
            "FedAvg": {"model.class_path": "FedAvg"},
            "Mine": {"model.class_path": "mine.Mine"},
        },
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "search.yaml").write_text(yaml.safe_dump(content))
        file = folder / "mine.py"
        for version in range(1, 6):
            times = factor if version == 4 else 1.0
            code = METHOD.replace("DRAWS", str(version)).replace("FACTOR", str(times))
            file.write_text(code)
            record = _step(folder, "try")
        shutil.copy(folder / f"runs/search/search/versions/{record['best']}/mine.py", file)
        return _step(folder, "judge")


def _step(folder: Path, step: str) -> dict[str, Any]:
    words = [sys.executable, "-m", "pfl", "search", step, "search.yaml", "--jobs", "1"]
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        raise ConfigError(done.stderr.splitlines()[-1])
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--searches", type=int, default=0)
    parser.add_argument("--real", type=int, default=0)
    given = parser.parse_args()
    if given.searches:
        print("| planted | deviation | noise | looks | improves | cannot be told | worse |")
        print("|---|---|---|---|---|---|---|")
        kinds = (("normal", None, 1), ("t(3)", 3, 1), ("normal", None, 2))
        for gain, deviation, kind in itertools.product((0.0, GAIN), DEVIATIONS, kinds):
            noise, tail, looks = kind
            ends = Counter(
                drawn_verdict(number, gain, deviation, tail=tail, looks=looks)
                for number in range(given.searches)
            )
            shares = " | ".join(f"{ends[word] / given.searches:.1%}" for word in VERDICTS.values())
            print(f"| {gain} | {deviation} | {noise} | {looks} | {shares} |", flush=True)
    if given.real:
        print("| planted | verdict | difference | interval | p | seeds of the look |")
        print("|---|---|---|---|---|---|")
    for number in range(given.real):
        for planted, factor in (("luck", 1.0), ("gain", 1.25)):
            look = real_verdict(number, factor)
            print(
                f"| {planted} | {look['verdict']} | {look['difference']:+.4f} | "
                f"{look['low']:+.4f} … {look['high']:+.4f} | {look['p']:.2g} | "
                f"{len(look['gains'])} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
