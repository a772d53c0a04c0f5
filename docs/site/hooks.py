"""Hooks of mkdocs, for what the pages link to outside of docs/.

The pages are written for people who read them in the repository, with links such as
`../benchmarks/results/peers.md`. On the site the benchmark results are pages too, and a link to
another file of the repository is the path of that file.
"""

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds benchmarks/results/*.md as pages of benchmarks/."""
    for path in sorted((ROOT / RESULTS).glob("*.md")):
        files.append(File.generated(config, f"benchmarks/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mends links that leave docs/."""
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

    return LINK.sub(mend, markdown)
