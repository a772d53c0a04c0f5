"""Rounds: who trains in a round, how models are scored, and how checkpoints are written."""
