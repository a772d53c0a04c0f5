"""The version of the package, also where it is not installed."""

__version__ = "0.1.0"
