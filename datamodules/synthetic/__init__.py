"""Synthetic problems with known constants and solutions."""
