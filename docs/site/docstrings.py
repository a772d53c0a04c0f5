"""An extension of griffe: the docstrings of this project as Markdown, and its public names."""

import re
from typing import Any

import griffe

ALIGNED = re.compile(r"^\S.*\n+(?:.*\n)*? {4,}\S")  # lines below each other, as formulas have them
SECTION = re.compile(r"^ *(?:\w+:$|\* |>>>)", re.M)
BARE = re.compile(r"(?<![<`>])<(?=[^<>`]*>)")


class Docstrings(griffe.Extension):
    """Shows examples and aligned formulas as code, and inner products such as <g, w> as text."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Changes the docstring of an object before it is parsed."""
        if obj.docstring:
            value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            paragraphs = [
                f"```text\n{p}\n```"
                if ALIGNED.search(p) and not SECTION.search(p)
                else BARE.sub("&lt;", p)
                for p in value.split("\n\n")
            ]
            obj.docstring.value = "\n\n".join(paragraphs)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Makes the names public that a package's stub imports, as it lists them nowhere else."""
        if pkg.name == "datamodules":
            inside = f"{pkg.name}."
            imported = (member for member in pkg.members.values() if member.is_alias)
            pkg.exports = [a.name for a in imported if a.target_path.startswith(inside)]  # type: ignore[union-attr]
