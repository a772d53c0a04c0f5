"""The tables and figures of a comparison, sent to W&B."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pfl.errors import ConfigError
from pfl.report import comparison_tables as tables
from pfl.report.comparison import Comparison


def send(
    project: str, title: str, comparisons: Sequence[Comparison], files: Sequence[Path]
) -> None:
    """Sends a comparison to W&B as a run with the job type `compare`.

    Args:
        project: The project of W&B.
        title: The name of the run.
        comparisons: One for each point of the grid; each has the tables `scores` and `statistics`.
        files: The files of the comparison, of which the PNG images are sent; W&B's own files come
            into their folder.

    Raises:
        ConfigError: Nobody is logged in.
    """
    import wandb

    content: dict[str, Any] = {p.stem: wandb.Image(str(p)) for p in files if p.suffix == ".png"}
    for number, comparison in enumerate(comparisons, 1):
        behind = f"-{number}" if len(comparisons) > 1 else ""
        made = (tables.score_table(comparison), tables.statistics_table(comparison))
        for name, table in zip(("scores", "statistics"), made, strict=True):
            content[name + behind] = wandb.Table(columns=[*table.heads], data=table.cells[1:])
    about = {"points": [comparison.title for comparison in comparisons]}
    try:
        run = wandb.init(
            project=project, name=title, job_type="compare", dir=files[0].parent, config=about
        )
    except wandb.errors.UsageError as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"compare: --wandb: {line} Without: WANDB_MODE=offline") from error
    with run:
        run.log(content)
