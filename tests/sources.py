"""The sources of the packages as syntax trees, for tests that hold rules about the code."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("pfl", "models", "datamodules")


def sources(package: str) -> dict[str, ast.Module]:
    """Returns the syntax trees of a package's modules by dotted name; a folder is a module, too."""
    trees = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text())
        for node in ast.walk(trees[name]):
            if isinstance(node, ast.ImportFrom):
                _resolve(node, ".".join(parts[: len(parts) - node.level]))
    return trees


def _resolve(node: ast.ImportFrom, above: str) -> None:
    """Names the module of an import from the root of the repository.

    Args:
        node: The import.
        above: The package that its dots mean, if it has any.
    """
    node.module = ".".join(filter(None, [above if node.level else "", node.module]))
    if node.module.startswith(("pfl.models", "pfl.datamodules")):
        node.module = node.module.removeprefix("pfl.")
    node.level = 0


def imports(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Yields the module and the name of every import, lazy ones and those for types included.

    The name is None for `import module`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)
