"""The rooms of each package depend on each other one way, and the documents list all modules."""

import re
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.sources import PACKAGES, ROOT, imports, sources

# Each room may import from itself and from the rooms before it. "" are the modules in the root.
PFL = ["", "engines", "clients", "distributed", "scores", "aggregation", "stages"]
PFL += ["rounds", "method"]
PFL += [
    "algorithms",
    "report",
    "callbacks",
    "trainer",
    "pfl",
    "configuration",
    "experiments",
    "deploy",
    "export",
    "cli",
]
PFL += ["__main__"]
DATA = ["", "partitions", "protocols", "rules", "samples", "transforms", "loaders", "base"]
DATA += ["sources", "synthetic", "exports", "datamodules"]


def room(module, rooms):
    """Returns the room of a module: a folder, the package itself, a named module, or the root."""
    package, name = [*module.split("."), ""][:2]
    folder = (ROOT / package / name).is_dir()
    return package if not name else name if folder or name in rooms else ""


@cache
def graph_of(package):
    """For each module of a package, the modules of the package that it imports."""
    trees = sources(package)
    graph = {}
    for module, tree in trees.items():
        targets = {
            f"{source}.{name}" if f"{source}.{name}" in trees else source
            for source, name in imports(tree)
        }
        graph[module] = targets & trees.keys()
    return graph


@pytest.fixture(scope="module", params=[("pfl", PFL), ("datamodules", DATA)], ids=lambda p: p[0])
def rooms_and_graph(request):
    """The order of a package's rooms; for each module, the package's modules that it imports."""
    package, rooms = request.param
    return rooms, graph_of(package)


def test_every_folder_is_a_room_of_the_order(rooms_and_graph):
    rooms, graph = rooms_and_graph
    assert {room(module, rooms) for module in graph} == set(rooms)


def test_rooms_depend_one_way(rooms_and_graph):
    rooms, graph = rooms_and_graph
    upward = {
        (module, target)
        for module, targets in graph.items()
        for target in targets
        if rooms.index(room(target, rooms)) > rooms.index(room(module, rooms))
    }
    assert upward == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_have_no_circles(package):
    """Imports for type checkers alone count as well."""
    try:
        TopologicalSorter(graph_of(package)).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_folders_of_engines_are_imported_by_nothing_but_themselves():
    """They register themselves, so that one can be deleted."""
    folders = {path.parent.name for path in (ROOT / "pfl" / "engines").glob("*/__init__.py")}
    used = {
        (module, target)
        for module, targets in graph_of("pfl").items()
        for target in targets
        for folder in folders
        if target.startswith(f"pfl.engines.{folder}")
        and not module.startswith(f"pfl.engines.{folder}")
    }
    assert used == set()


@pytest.mark.parametrize("package", ["models", "datamodules"])
def test_models_and_datamodules_import_no_other_package_of_ours(package):
    used = {
        (module, source)
        for module, tree in sources(package).items()
        for source, _ in imports(tree)
        if source.partition(".")[0] in set(PACKAGES) - {package} and source != "pfl._short_names"
    }
    assert used == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_our_modules_do_not_use_the_short_names(package):
    """A user's project may have `models` and `datamodules` of its own."""
    short = re.compile(r"^\s*(?:from|import) (?:models|datamodules)\b", re.M)
    paths = (ROOT / package).rglob("*.py")
    assert [path for path in paths if short.search(path.read_text())] == []


# ---- the map of modules -------------------------------------------------------------------------


def mapped_modules():
    """The modules that CONTRIBUTING.md lists, by folder.

    The map is the first fenced block under "Where everything lies". A line is a folder and its
    modules, as in `engines/  base, sequential`; a line without a folder continues the line before.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text()
    _, _, layout = text.partition("\n## Where everything lies\n")
    folders, folder = {}, ""
    for line in layout.split("```")[1].splitlines()[1:]:
        head = re.match(r"\s*([\w/]+)/\s", line + " ")
        if head:
            folder = head[1].rpartition("/")[2]
            line = line[head.end() :]
        folders.setdefault(folder, set()).update(re.findall(r"\w+", line))
    return {folder: modules for folder, modules in folders.items() if modules}


def test_the_map_lists_every_module():
    expected = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if not path.stem.startswith("__"):
                expected.setdefault(path.parent.name, set()).add(path.stem)
    mapped = mapped_modules()
    if not (ROOT / "pfl" / "engines" / "chains" / "__init__.py").exists():  # it can be deleted
        del mapped["chains"]
    assert mapped == expected
