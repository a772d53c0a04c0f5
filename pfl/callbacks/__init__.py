"""What happens around a run: records, progress, checkpoints, comparison."""

from pfl.callbacks.alone import TrainAlone
from pfl.callbacks.checkpoint import RoundCheckpoint
from pfl.callbacks.figures import CollaborationMap, RunFigure
from pfl.callbacks.optimality import Optimality
from pfl.callbacks.progress import RoundProgress
from pfl.callbacks.recorder import RunRecorder
from pfl.callbacks.wandb import WandbRecord

__all__ = [
    "CollaborationMap",
    "Optimality",
    "RoundCheckpoint",
    "RoundProgress",
    "RunFigure",
    "RunRecorder",
    "TrainAlone",
    "WandbRecord",
]
