"""An extension of griffe: the docstrings of this project as Markdown."""

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
