"""Models of a run as files for other programs."""

from pfl.export.run import export

__all__ = ["export"]
