"""Hooks of mkdocs, for what the pages link to outside of docs/.

The pages are written for people who read them in the repository, with links such as
`../benchmarks/results/peers.md`. On the site the benchmark results are pages too, and a link to
another file of the repository is the path of that file. Every method has a page, made of its
docstring. A site that a workflow of GitHub builds has
a link that opens the notebook in Colab, which needs the repository's public address.
"""

import os
import re
from importlib.metadata import version
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import pfl.algorithms

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")
NOTEBOOK = re.compile(r"\[[^\]]*\]\(([\w-]+\.ipynb)\)")  # in the folder docs/
COLAB = "https://colab.research.google.com/github"


METHODS = sorted(set(pfl.algorithms.__all__) - {"FederatedAlgorithm"}, key=str.lower)
METHOD_PAGE = """# {name}

::: pfl.algorithms.{name}
    options: {{show_root_heading: false, show_root_toc_entry: false, heading_level: 2}}

[All methods beside each other](../methods.md): what they share, keep, send and cost, and the tests
that judge them. [Agreement with other implementations](../compared-with-other-implementations.md).
[Results](../results.md).
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills the footer with version, licence and repository, and the menu with the methods."""
    config.copyright = f"lightning-pfl {version('lightning-pfl')}, Apache-2.0"
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
        page = METHOD_PAGE.format(name=name)
        files.append(File.generated(config, f"methods/{name}.md", content=page))
    for path in sorted((ROOT / RESULTS).glob("*.md")):
        files.append(File.generated(config, f"benchmarks/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mends links that leave docs/, adds Colab's to a notebook's, and keeps "mean ± std" whole."""
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

    markdown = LINK.sub(mend, markdown).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    if repository := os.environ.get("GITHUB_REPOSITORY"):  # such as "owner/name"
        in_colab = rf"\g<0> ([open it in Colab]({COLAB}/{repository}/blob/main/docs/\1))"
        markdown = NOTEBOOK.sub(in_colab, markdown)
    return markdown
