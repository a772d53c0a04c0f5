"""Several processes: how they start, share clients and exchange results."""
