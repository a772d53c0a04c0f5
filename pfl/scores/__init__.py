"""Scores of clients: their names, how they are computed, the table on disk, and runs read back."""
