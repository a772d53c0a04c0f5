"""A statement a line: few tuples packed into one assignment, few conditional expressions."""

import ast

from tests.sources import PACKAGES, ROOT, sources


def is_packed(node):
    """Whether a node is an assignment such as `a, b = x, y`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def test_density():
    lines = packed = conditional = 0
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            lines += len(path.read_text().splitlines())
        for tree in sources(package).values():
            nodes = list(ast.walk(tree))
            packed += sum(map(is_packed, nodes))
            conditional += sum(isinstance(node, ast.IfExp) for node in nodes)
    assert lines > 40_000
    assert packed <= 3 * lines / 1000
    assert conditional <= 8 * lines / 1000
