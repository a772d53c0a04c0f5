"""The rooms of `pfl` depend on each other in one direction, and the documents list all modules."""

import re
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.sources import PACKAGES, ROOT, imports, sources

# Each room may import from itself and from the rooms before it. "" are the modules in the root.
ROOMS = ["", "engines", "clients", "distributed", "scores", "rounds", "method", "algorithms"]
ROOMS += ["report", "callbacks", "trainer", "pfl", "configuration", "experiments", "export", "cli"]
ROOMS += ["__main__"]


def room(module):
    """Returns the room of a module: a folder of `pfl`, "trainer", "pfl" itself, or the root."""
    name = [*module.split("."), ""][1]
    folder = (ROOT / "pfl" / name).is_dir()
    return "pfl" if module == "pfl" else name if folder or name in ROOMS else ""


def graph_of(*, typing):
    """For each module of `pfl`, the modules of `pfl` that it imports."""
    trees = sources("pfl")
    graph = {}
    for module, tree in trees.items():
        targets = {
            f"{source}.{name}" if f"{source}.{name}" in trees else source
            for source, name in imports(tree, typing=typing)
        }
        graph[module] = targets & trees.keys()
    return graph


@pytest.fixture(scope="module")
def graph():
    """All imports, those for type checkers included."""
    return graph_of(typing=True)


def test_every_folder_is_a_room_of_the_order(graph):
    assert {room(module) for module in graph} == set(ROOMS)


def test_rooms_depend_one_way(graph):
    upward = {
        (module, target)
        for module, targets in graph.items()
        for target in targets
        if ROOMS.index(room(target)) > ROOMS.index(room(module))
    }
    assert upward == set()


def test_modules_have_no_circles():
    """A part of an object may name the object's type, for type checkers alone."""
    try:
        TopologicalSorter(graph_of(typing=False)).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("package", ["models", "datamodules"])
def test_models_and_datamodules_import_no_other_package_of_ours(package):
    used = {
        (module, source)
        for module, tree in sources(package).items()
        for source, _ in imports(tree)
        if source.partition(".")[0] in set(PACKAGES) - {package}
    }
    assert used == set()


# ---- the map of modules -------------------------------------------------------------------------


def mapped_modules():
    """The modules that docs/architecture.md lists, by folder.

    The map is the first fenced block under "Where everything lies". A line is a folder and its
    modules, as in `engines/  base, sequential`; a line without a folder continues the line before.
    """
    text = (ROOT / "docs" / "architecture.md").read_text()
    _, _, layout = text.partition("\n## Where everything lies\n")
    folders, folder = {}, ""
    for line in layout.split("```")[1].splitlines()[1:]:
        head = re.match(r"\s*([\w/]+)/\s", line + " ")
        if head:
            folder = head[1].rpartition("/")[2]
            line = line[head.end() :]
        folders.setdefault(folder, set()).update(re.findall(r"\w+", line))
    return folders


def test_the_map_lists_every_module():
    expected = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if not path.stem.startswith("__"):
                expected.setdefault(path.parent.name, set()).add(path.stem)
    assert mapped_modules() == expected
