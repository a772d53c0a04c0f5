"""An extension of griffe: the docstrings of this project as Markdown."""

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
