"""Hooks of mkdocs, for what the pages link to outside of docs/.

The pages are written for people who read them in the repository, with links such as
`../benchmarks/results/peers.md`. On the site the benchmark results are pages too, and a link to
another file of the repository is the path of that file. A site that a workflow of GitHub builds has
a link that opens the notebook in Colab, which needs the repository's public address.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")
NOTEBOOK = re.compile(r"\[[^\]]*\]\(([\w-]+\.ipynb)\)")  # in the folder docs/
COLAB = "https://colab.research.google.com/github"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds benchmarks/results/*.md as pages of benchmarks/."""
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
        return text if text.strip("`") == path.as_posix() else f"{text} (`{path.as_posix()}`)"

    markdown = LINK.sub(mend, markdown).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    if repository := os.environ.get("GITHUB_REPOSITORY"):  # such as "owner/name"
        in_colab = rf"\g<0> ([open it in Colab]({COLAB}/{repository}/blob/main/docs/\1))"
        markdown = NOTEBOOK.sub(in_colab, markdown)
    return markdown
