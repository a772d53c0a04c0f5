"""Partition rules, which assign samples to clients, and other projects' conventions."""
