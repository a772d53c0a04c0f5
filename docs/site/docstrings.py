"""An extension of griffe: the docstrings of this project as Markdown, and its public names."""

import html
import re
from typing import Any

import griffe

ALIGNED = re.compile(r"^ {4,}\S|\S {3,}\S", re.M)  # formulas below each other, or beside a remark
SECTION = re.compile(r"^ *(?:\w+:$|\* |>>>)", re.M)
CODE = re.compile(r"(`[^`]*`)")
ARROWS = {"<-": "←", "->": "→", "<=": "≤", ">=": "≥"}
INNER = re.compile(r"<(?=\S)([^<>]*\S)>")  # an inner product, <g, w>
BASE = r"\||\b(?:[^\W\d_]\d?|mean|sum|min|max|grad|Prox)"  # a norm, a letter, or an operator
INDEX = r"\{([^}]*)\}|\(([^)]*)\)|(\[[^\]]*\]|[^\W_]{1,4}(?:,[a-z]\b)?(?!\w))"
BELOW = re.compile(rf"({BASE})_(?:{INDEX})")
POWER = r"\{([^}]*)\}|\(([^)]*)\)|(-?\d+(?:[./]\d+)?|[^\W\d_](?:_[a-z]\b)?|\*)"
ABOVE = re.compile(rf"\^(?:{POWER})")


def typeset(text: str) -> str:
    """Writes formulas in plain text, such as `w_i <- x^2`, with HTML's indices and powers."""
    for plain, sign in ARROWS.items():
        text = text.replace(plain, sign)
    if "←" in text:
        text = re.sub(r";\n|[.:]\n(?=\S+ ←)", lambda end: f"{end[0][0]}  \n", text)  # a line's end
    text = html.escape(INNER.sub(r"⟨\1⟩", text), quote=False)
    text = ABOVE.sub(lambda found: f"<sup>{found[1] or found[2] or found[3]}</sup>", text)
    return _indices(text)


def _indices(text: str) -> str:
    """Writes what stands below, and what stands below that, as in Prox_{λ η_g}."""

    def below(found: re.Match[str]) -> str:
        index = found[2] or found[3] or found[4]
        return f"{found[1]}<sub>{_indices(index)}</sub>"

    return BELOW.sub(below, text)


def aligned(paragraph: str) -> str:
    """Returns lines that are aligned by spaces as a table."""
    rows = ""
    for line in typeset(paragraph).split("\n"):
        first, *others = re.split(r"(?<=:) {2,}| {3,}", line.rstrip(), maxsplit=1)
        cells = [f"<td>{first}</td>", *(f"<td>{cell}</td>" for cell in others)]
        rows += f"<tr>{''.join(cells) if others else f'<td colspan=2>{first}</td>'}</tr>"
    return f'<table class="formula">{rows}</table>'


def markdown(docstring: str, has_formulas: bool) -> str:
    """Returns a docstring as Markdown; code between backticks, and examples, stay as they are."""
    paragraphs = re.sub(r"^( *)Example:$", r"\1Examples:", docstring, flags=re.M).split("\n\n")
    for number, text in enumerate(paragraphs):
        if ALIGNED.search(text) and not SECTION.search(text):
            paragraphs[number] = aligned(text) if has_formulas else f"```text\n{text}\n```"
        elif ">>>" not in text:
            parts = CODE.split(text)
            parts[::2] = [typeset(p) if has_formulas else html.escape(p, False) for p in parts[::2]]
            paragraphs[number] = "".join(parts)
    return "\n\n".join(paragraphs)


class Docstrings(griffe.Extension):
    """Typesets the formulas of methods, and shows other aligned text as code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Changes the docstring of an object before it is parsed."""
        if obj.docstring:
            has_formulas = obj.path.startswith(
                ("pfl.algorithms.", "pfl.aggregation.", "pfl.method.")
            )
            obj.docstring.value = markdown(obj.docstring.value, has_formulas)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Makes the names public that these packages, or their stubs, import."""
        if pkg.name == "pfl":
            for room in (pkg["algorithms"], pkg["datamodules"], pkg["models"]):
                imported = (member for member in room.members.values() if member.is_alias)
                room.exports = [a.name for a in imported if a.target_path.startswith(room.path)]
