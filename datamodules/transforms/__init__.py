"""Transforms of whole batches of samples."""
