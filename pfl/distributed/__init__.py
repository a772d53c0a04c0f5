"""Several processes: the strategy, their start and end, sums and gathers over them."""
