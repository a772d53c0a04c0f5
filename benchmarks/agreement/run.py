"""The tables of docs/record/compared-with-other-implementations.md, and docs/data/agreement.csv.

    python -m benchmarks.agreement.run --checkouts DIR            # projects that DIR has
    python -m benchmarks.agreement.run --checkouts DIR PFLlib     # only this one
    python -m benchmarks.papers                                   # the short page's table, then

DIR has git checkouts of the projects, or their unpacked wheels, each in a folder of the project's
name. Those that need
packages of their own run in environments that `benchmarks/compare.py` makes (with uv, from PyPI).
Every project runs in a process of its own. What its page says must hold: where a method is said to
agree it must do so to rounding, where a reason is given for a difference, our method changed by it
must agree. Otherwise the program says where not, and ends with 1.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import published
from benchmarks.agreement import ours
from benchmarks.agreement.case import HEADER, Case
from benchmarks.agreement.problem import Iterates, commit
from benchmarks.compare import CACHE, install

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "record" / "compared-with-other-implementations.md"
TABLE = r"<!-- table of ([^\n]*) -->\n(.*?)\n<!-- end of \1 -->"


@dataclass(frozen=True)
class Project:
    """Another project.

    Attributes:
        owner: On GitHub.
        name: On GitHub, of its folder, and of its section on the page.
        module: The name of its files in drivers/ and cases/.
        commit: Which the page speaks of.
        release: Of a wheel that is unpacked in its folder; `commit` is the digest of its RECORD.
        peer: The environment that it runs in; "" is ours.
    """

    owner: str
    name: str
    module: str
    commit: str
    peer: str = ""
    release: str = ""

    def python(self) -> str:
        """The interpreter of its environment, which is made if there is none."""
        if not self.peer:
            return sys.executable
        executable = CACHE / f"env-{self.peer}" / "bin" / "python"
        if not executable.exists():
            CACHE.mkdir(exist_ok=True)
            if problem := install(self.peer):
                raise SystemExit(f"{self.name}: {problem}")
        return str(executable)


PROJECTS = [
    Project("TsingZ0", "PFLlib", "pfllib", "d832e76f6a23b833038949ec1e4fdefe63a4d350"),
    Project("TsingZ0", "HtFLlib", "htfllib", "e959261d906f40377410bc4d9d13ba3f6af56782"),
    Project("LipingYi", "FedMRL", "fedmrl", "8b90f41e973ef0977f185510c8f0b7a2c778647a"),
    Project(
        "diaoenmao",
        "HeteroFL-Computation-and-Communication-Efficient-Federated-Learning-for-"
        "Heterogeneous-Clients",
        "heterofl",
        "cc40f3e46b0fab5364d62a1bb623d3764daf179d",
    ),
    Project("AIoT-MLSys-Lab", "FedRolex", "fedrolex", "813510997e1802eb756d53baa4229c90ce5ac008"),
    Project("KarhouTam", "FL-bench", "fl_bench", "06e658bca5af6ce732e25bb7c0f8be321e14a85e"),
    Project(
        "epfml",
        "federated-learning-public-code",
        "feddf",
        "44dd5551071969eb354ee2ed091a9ba36c1d5b08",
    ),
    Project("ljaiverson", "pFL-APPLE", "apple", "8078196731b5493ab408fff4fe80f058e2e538f4"),
    Project("yuetan031", "FedProto", "fedproto", "97e42e2741e1ae2e2fce2465e80f38f6997f8836"),
    Project("alpemreacar", "FedDyn", "feddyn", "48a19fac440ef079ce563da8e0c2896f8256fef9"),
    Project("huangtiansheng", "fedslr", "fedslr", "35dc740caac562b212288c3bf58106f416a391fb"),
    Project("CharlieDinh", "pFedMe", "pfedme", "caf24b1f954d4381bd9b4d104ee7eff389e1489b"),
    Project("LucasXinYu", "FedCLUP", "fedclup", "e7ed42af63adba9d03bd6a8ad5495d23ceb1e83a"),
    Project("564612540", "FedPD", "fedpd", "badde1702c43631991510820e514fa8138f7d9d5"),
    Project(
        "felisat",
        "clustered-federated-learning",
        "cfl",
        "23a1c3887ed151a9c6340370337804766d11c69c",
    ),
    Project("JYWa", "FedNova", "fednova", "47b4e096dfb19dc43c728896fff335a5befb645d"),
    Project("jichan3751", "ifca", "ifca", "61e44b8977a53c25368e8120aac6a505496ebbdf"),
    Project("AvivSham", "pFedHN", "pfedhn", "1bc054975232bdd6985f931030753ebbab48c56d"),
    Project("omarfoq", "knn-per", "knn_per", "ee1752027798e8ab8f57f77c6ee74f946c0f4cd7"),
    Project("facebookresearch", "FLSim", "flsim", "7311f2db471f89f14a0c8c9ea1c9584171677f5a"),
    Project("pliang279", "LG-FedAvg", "lg_fedavg", "7af0568b2cae88922ebeacc021b1679815092f4e"),
    Project("jhoon-oh", "FedBABU", "fedbabu", "e34c15b4288224f0af1bc13670bc0cdc373c9576"),
    Project("lgcollins", "FedRep", "fedrep", "d82e62982e107bb3322541604f059c0ff28bd289"),
    Project(
        "google", "fedjax", "fedjax_runs", "c57ee1970fcd74b560c3d7e5716fae32287daa7b", "fedjax"
    ),
    Project(
        "apple",
        "pfl-research",
        "pfl_research",
        "c9d1f32f6e84fec984f448e2bc19a3e3fd5a4807",
        "pfl_research",
    ),
    Project("makgyver", "fluke", "fluke_runs", "a0bd26ab488fe97fd3b682f506ce2e6896be3041", "fluke"),
    Project(
        "APPFL",
        "APPFL",
        "appfl",
        "96f5f2677d0aaa9f667fcb60e1700ca492357adc044fde451048f465058776b3",
        release="1.12.0",
    ),
    Project(
        "RaghavSinghal10", "fedex-lora", "fedex_lora", "683a3f30dd969c19a6a995d424f2e475cc283e4c"
    ),
    Project(
        "ATP-1010", "FederatedLLM", "federated_llm", "7bea15826bc0de37da35e44bc34a39274e3cc09f"
    ),
    Project("Pengxin-Guo", "FedSA-LoRA", "fedsa_lora", "fc276b5ead4208c75fb0b2dd16923f307afb3acd"),
    Project(
        "boyi-liu", "FedLLM-Factory", "fedllm_factory", "6a0679920adfc397ea3ab8727ee380b9f1593cb7"
    ),
    Project("rui-ye", "OpenFedLLM", "openfedllm", "14c6af2dd5c830e8b22a48b263ae33afdd285fc8"),
]


def table(project: Project, checkout: Path) -> tuple[str, list[str]]:
    """A project's table, and what contradicts the page."""
    cases: list[Case] = importlib.import_module(
        f"benchmarks.agreement.cases.{project.module}"
    ).CASES
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "problem.npz", Path(folder) / "theirs.npz"
        ours.problem().save(given)
        driver = HERE / "drivers" / f"{project.module}.py"
        command = [project.python(), *map(str, (driver, given, checkout, made))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        theirs: dict[str, Iterates] = {}
        with np.load(made) as file:
            for name in file.files:
                case, _, iterate = name.partition("|")
                theirs.setdefault(case, {})[iterate] = file[name]
    rows, wrong = zip(*(case.row(theirs) for case in cases), strict=True)
    problems = [problem for one in wrong for problem in one]
    if (found := commit(checkout)) != project.commit:
        problems.append(f"the checkout is {found}, the page speaks of {project.commit}")
    kind = f"wheel {project.release}, SHA-256 of RECORD" if project.release else "commit"
    source = f"`{project.owner}/{project.name}`, {kind} `{project.commit[:8]}`.\n"
    return "\n".join([source, HEADER, *rows]), [
        f"{project.name}: {problem}" for problem in problems
    ]


def write(name: str, text: str) -> None:
    """Replaces a project's table on the page."""
    begin, end = f"<!-- table of {name} -->\n", f"\n<!-- end of {name} -->"
    before, _, rest = PAGE.read_text().partition(begin)
    after = rest.partition(end)[2]
    PAGE.write_text(before + begin + text + end + after)


def records() -> Iterator[dict[str, str]]:
    """Yields the rows of all tables of the page, each with the project and its version."""
    known = {project.name: project for project in PROJECTS}
    for name, text in re.findall(TABLE, PAGE.read_text(), re.S):
        project = known[name]
        _, _, *table = text.splitlines()
        names, _, *lines = (line.strip("|").split("|") for line in table)
        for cells in lines:
            what = {"project": f"{project.owner}/{project.name}", "version": project.commit}
            pairs = zip(names, cells, strict=True)
            found = {column.strip(): cell.strip() for column, cell in pairs}
            yield {**what, "release": project.release, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("projects", nargs="*", metavar="PROJECT", help="those that DIR has")
    parser.add_argument("--checkouts", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    known = [project.name for project in PROJECTS]
    if unknown := set(args.projects) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    problems = []
    for project in PROJECTS:
        checkout = args.checkouts / project.name
        if project.name in args.projects or (not args.projects and checkout.is_dir()):
            text, wrong = table(project, checkout.resolve())
            print(f"\n{project.name}\n{text}", flush=True)
            write(project.name, text)
            problems += wrong
    published.publish("agreement", list(records()))
    print("\n".join(problems))
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
