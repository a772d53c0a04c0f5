"""Hooks of mkdocs, for what the pages link to outside of docs/.

The pages are written for people who read them in the repository, with links such as
`../benchmarks/results/peers.md`. On the site the benchmark results are pages too, and a link to
another file of the repository is the path of that file. Every method has a page, made of its
docstring and of its rows in the tables of other pages. A site that a workflow of GitHub builds has
a link that opens the notebook in Colab, which needs the repository's public address. `llms.txt`
lists all pages for programs that read the site.
"""

import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

import pfl.algorithms

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")
FIGURE = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+\.png)\)$", re.M)
WIDE = 7  # columns of a table that takes the place of the page's table of contents
NOTEBOOK = re.compile(r"\[[^\]]*\]\(([\w-]+\.ipynb)\)")  # in the folder docs/
COLAB = "https://colab.research.google.com/github"


MENU: list[Any] = []  # the sections and pages of the site that is built
METHODS = sorted(set(pfl.algorithms.__all__) - {"FederatedAlgorithm"}, key=str.lower)
METHOD_PAGE = """# {name}

::: pfl.algorithms.{name}
    options: {{show_root_heading: false, show_root_toc_entry: false, members: false}}

Every method has [these arguments](../reference/method.md#pfl.method.FederatedAlgorithm), too.

## Cost

{cost}

[All methods beside each other](../methods.md), where the words are explained.

## Agreement with other implementations

{agreement}

## Results

{results}
"""


def tables(page: str) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yields the tables of a page in docs/: the heading above, the names of columns, the rows."""
    heading, head, rows = "", [], []
    for line in [*(ROOT / "docs" / page).read_text().splitlines(), ""]:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if not head:
                head = cells
            elif set(line) - set("|-: "):
                rows.append(cells)
        else:
            if head:
                yield heading, head, rows
                head, rows = [], []
            heading = line.lstrip("# ") if line.startswith("#") else heading


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def method_page(name: str) -> str:
    """Returns the page of a method: its docstring, and what the tables of other pages say of it."""
    cost, agreement, results = [], [], []
    for _, head, rows in tables("methods.md"):
        for row in rows:
            if f"`{name}`" in row[0]:
                cost += [[f"**{key}**", cell] for key, cell in zip(head, row, strict=True)][1:]
    for project, head, rows in tables("record/compared-with-other-implementations.md"):
        for row in rows:
            if head[0] == "method" and re.match(rf"{name}\b", row[0]):
                agreement.append([project, *row])
    columns = ["project", *head]
    for heading, head, rows in tables("record/leaderboard.md"):
        for row in rows:
            if heading == "The leaderboard of five problems" and row[0].replace("-", "") == name:
                results += [[key, cell] for key, cell in zip(head, row, strict=True)][1:]
    other = "compared-with-other-implementations.md"
    board = "[a leaderboard](../record/leaderboard.md)"
    return METHOD_PAGE.format(
        name=name,
        cost=re.sub(r"\]\((?!http)", "](../", markdown_table(["", ""], cost)),
        agreement=f"[How both are compared](../{other}), and in what the columns differ.\n\n"
        + markdown_table(columns, agreement)
        if agreement
        else f"No [other implementation](../{other}) was run beside this one.",
        results=f"Of {board}, where methods, data and tuning are described.\n\n"
        + markdown_table(["", ""], results)
        if results
        else f"The method is not on {board}.",
    )


def mark_best(markdown: str) -> str:
    """Returns the leaderboard with the best method of each column in bold.

    GlobalTrain, which pools the samples, does not count.
    """

    def mark(found: re.Match[str]) -> str:
        if "±" not in found[0]:
            return found[0]
        head, *rows = [line.strip("|").split("|") for line in found[0].splitlines()]
        for column, name in enumerate(head):
            numbers = {
                number: float(value[0])
                for number, row in enumerate(rows)
                if (value := re.match(r" [\d.]+", row[column])) and row[0].strip() != "GlobalTrain"
            }
            best = (min if "rank" in name else max)(numbers.values(), default=None)
            for number in (number for number, value in numbers.items() if value == best):
                rows[number][column] = f" **{rows[number][column].strip()}** "
        return "".join(f"|{'|'.join(cells)}|\n" for cells in [head, *rows])

    return re.sub(r"(?:^\|.*\n)+", mark, markdown, flags=re.M)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills head and footer with version, licence and repository, and the menu with the methods."""
    config.site_name = f"{config.site_name} {version('lightning-pfl')}"
    config.copyright = f"{config.site_name}, Apache-2.0"
    if repository := os.environ.get("GITHUB_REPOSITORY"):  # such as "owner/name"
        config.repo_url = f"https://github.com/{repository}"
        config.copyright += f', <a href="{config.repo_url}">{repository}</a>'
    pages = [{name: f"methods/{name}.md"} for name in METHODS]
    for entry in config.nav or []:
        if "Methods" in entry:
            entry["Methods"] = [*entry["Methods"], {"Each method": pages}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds benchmarks/results/*.md as pages of benchmarks/, and a page for each method."""
    for name in METHODS:
        files.append(File.generated(config, f"methods/{name}.md", content=method_page(name)))
    for path in sorted((ROOT / RESULTS).glob("*.md")):
        files.append(File.generated(config, f"benchmarks/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mends links that leave docs/, adds Colab's to a notebook's, and keeps "mean ± std" whole.

    A picture becomes a link to itself in full size, and wide tables get the whole page.
    """
    results = page.file.src_uri.startswith("benchmarks/")
    here = PurePosixPath(RESULTS if results else "docs") / (
        "." if results else PurePosixPath(page.file.src_uri).parent
    )
    depth = "../" * page.file.src_uri.count("/")

    def mend(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = (ROOT / here / target).resolve().relative_to(ROOT)
        if path.parts[0] == "docs":
            return f"[{text}]({depth}{path.relative_to('docs').as_posix()}{anchor})"
        if path.parent == Path(RESULTS) and path.suffix == ".md":
            return f"[{text}]({depth}benchmarks/{path.name}{anchor})"
        if config and config.repo_url:
            return f"[{text}]({config.repo_url}/blob/main/{path.as_posix()})"
        return text if text.strip("`") == path.as_posix() else f"{text} (`{path.as_posix()}`)"

    if page.file.src_uri == "record/leaderboard.md":
        markdown = mark_best(markdown)
    columns = re.findall(r"^\|[-:| ]+\|$", markdown, re.M)
    if any(line.count("|") > WIDE for line in columns):
        page.meta["hide"] = [*page.meta.get("hide", []), "toc"]
    markdown = FIGURE.sub(r"[![\1](\2)](\2){ .figure }", markdown)
    markdown = LINK.sub(mend, markdown).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    if repository := os.environ.get("GITHUB_REPOSITORY"):  # such as "owner/name"
        in_colab = rf"\g<0> ([open it in Colab]({COLAB}/{repository}/blob/main/docs/\1))"
        markdown = NOTEBOOK.sub(in_colab, markdown)
    return markdown


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keeps the menu for `llms.txt`."""
    MENU[:] = nav.items
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Writes `llms.txt` beside the pages."""
    text = listed(config.site_name, config.site_description or "", MENU)
    (Path(config.site_dir) / "llms.txt").write_text(text, encoding="utf-8")


def listed(name: str, description: str, items: list[Any]) -> str:
    """Returns the pages of a menu, by section, each with its link."""
    sections: dict[str, list[str]] = {}

    def visit(item: Any, section: str) -> None:
        if item.is_section:
            for child in item.children:
                visit(child, item.title)
        elif item.is_page:
            entry = f"- [{item.title}]({item.url or 'index.html'})"
            sections.setdefault(section, []).append(entry)

    for item in items:
        visit(item, "Start")
    parts = [f"# {name}\n\n> {description}\n"]
    parts += [f"## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items()]
    return "\n".join(parts)
