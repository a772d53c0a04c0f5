"""How networks are run: batches, engines, local steps, threads."""
