"""Callbacks of a run: records, progress, checkpoints, figures, comparisons."""

from pfl.callbacks.embedding import EmbeddingFigure
from pfl.callbacks.local_baseline import LocalBaseline
from pfl.callbacks.optimality import Optimality
from pfl.callbacks.progress import RoundProgress
from pfl.callbacks.recorder import RunRecorder
from pfl.callbacks.round_checkpoint import RoundCheckpoint
from pfl.callbacks.run_figures import CollaborationMap, RunFigure
from pfl.callbacks.wandb import WandbRecord

__all__ = [
    "CollaborationMap",
    "EmbeddingFigure",
    "LocalBaseline",
    "Optimality",
    "RoundCheckpoint",
    "RoundProgress",
    "RunFigure",
    "RunRecorder",
    "WandbRecord",
]
