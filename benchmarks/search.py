"""How often `pfl search` is right: searches with planted variants, luck alone or a true gain.

    python -m benchmarks.search --searches 1000        # drawn scores, the harness's own decisions
    python -m benchmarks.search --real 10              # searches whose tries are real runs

A drawn search tries twenty versions and then asks for a verdict. In searches of luck no version is
better than the baseline; in the others one of them, at a random place, is better by two points
(0.02), and the others are not. Scores of a seed share what the seed makes easy or hard; the gain of
a version has the standard deviation of the row.

A real search gives the commands `pfl search try` and `judge` for real files and real runs: a
multilayer perceptron on scikit-learn's digits, with five clients. Each of its five versions draws
the initial network anew, from the same distribution as before: luck alone. The fourth version of a
search with a gain has a larger learning rate, too. How large its gain is, the looks themselves say.
"""

import argparse
import io
import itertools
import json
import os
import shutil
import tempfile
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from pfl.cli import main as command
from pfl.current_folder import add_current_folder
from pfl.errors import ConfigError
from pfl.experiments.search import CHOSEN, VERDICTS, Rules, Scores, Search
from pfl.scores.statistics import seeds_to_choose

GAIN = 0.02
EASE = 0.03  # the deviation of what all methods share under one seed
DEVIATIONS = (0.01, 0.02, 0.03)
PLANTED = {"luck": 1.0, "gain": 1.5}  # by which factor the rate of the fourth version is larger
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


def real_look(number: int, factor: float) -> dict[str, Any]:
    """Returns the record of the look of a search with real runs, whose seeds are the system's.

    The fourth of five versions multiplies the learning rate by `factor`.
    """
    content = {
        "seeds": [*range(100 * number, 100 * number + 4)],
        "search": {"tries": 5},
        "common": {
            "trainer": {"max_epochs": 10, "check_val_every_n_epoch": 10, "accelerator": "cpu"},
            "model.init_args": {
                "network": {"class_path": "MLP", "init_args": {"in_features": 64, "hidden": [16]}},
                "lr": 0.12,
                "local_epochs": 4,
                "batch_size": 20,
            },
            "data": {
                "class_path": "DigitsDataModule",
                "init_args": {
                    "num_clients": 5,
                    "partition": {"class_path": "IID"},
                    "protocol": {
                        "class_path": "SplitOwn",
                        "init_args": {"test": 0.5, "validation": 0.2},
                    },
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
    """Returns what a command prints, in a process that has the imports of this one."""
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_give, args=(folder, step, theirs))
    process.start()
    theirs.close()
    status, out, err = ours.recv()
    process.join()
    if status:
        raise ConfigError(err.splitlines()[-1])
    return json.loads(out)


def _give(folder: Path, step: str, pipe: Connection) -> None:
    os.chdir(folder)
    add_current_folder()
    torch.set_num_threads(1)
    out = io.StringIO()
    err = io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = command(["search", step, "search.yaml", "--jobs", "1"])
    pipe.send((status, out.getvalue(), err.getvalue()))


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
        real_searches(given.real)


def real_searches(number: int) -> None:
    """Prints the looks of so many searches of luck and of a gain, and what they found."""
    print("| planted | search | judged | verdict | difference | interval | p | seeds |")
    print("|---|---|---|---|---|---|---|---|")
    ends: dict[str, Counter[str]] = {"luck": Counter(), "gain": Counter()}
    chosen = []  # what each seed of a look has gained by the better version
    for one, (planted, factor) in itertools.product(range(number), PLANTED.items()):
        look = real_look(one, factor)
        ends[planted][look["verdict"]] += 1
        if planted == "gain" and look["best"] == 4:
            chosen += look["gains"]
        print(
            f"| {planted} | {one + 1} | version {look['best']} | {look['verdict']} | "
            f"{look['difference']:+.4f} | {look['low']:+.4f} to {look['high']:+.4f} | "
            f"{look['p']:.2g} | {len(look['gains'])} |",
            flush=True,
        )
    for planted, counts in ends.items():
        print(f"{planted}: " + ", ".join(f"{word} {n} of {number}" for word, n in counts.items()))
    if chosen:
        print(f"gain of version 4: {np.mean(chosen):+.4f}, {len(chosen)} seeds of looks")


if __name__ == "__main__":
    main()
