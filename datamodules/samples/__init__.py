"""Samples of a data set, in memory, in files, or in a data set of PyTorch."""
