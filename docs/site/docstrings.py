"""An extension of griffe: the docstrings of this project as Markdown, and its public names."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Shows examples as code, and inner products such as <g, w> as text and not as HTML."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Changes the docstring of an object before it is parsed."""
        if obj.docstring:
            value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(r"(?<![<`>])<(?=[^<>`]*>)", "&lt;", value)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Makes the names public that a package's stub imports, as it lists them nowhere else."""
        if pkg.name == "datamodules":
            inside = f"{pkg.name}."
            imported = (member for member in pkg.members.values() if member.is_alias)
            pkg.exports = [a.name for a in imported if a.target_path.startswith(inside)]  # type: ignore[union-attr]
