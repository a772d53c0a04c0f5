"""The names of what `Optimality` adds to the rows of `metrics.csv`."""

ERRORS = ("optimization_error", "total_error", "statistical_error")


def is_ours(name):
    return name.startswith(("train/global/", "train/personalized/"))
