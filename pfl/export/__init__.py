"""Models of a checkpoint as files that other programs load without `pfl`."""

from pfl.export.run import export

__all__ = ["export"]
