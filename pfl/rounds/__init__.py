"""Rounds: who trains in them, how models are scored, and how checkpoints are written."""
