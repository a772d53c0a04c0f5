"""Data modules for files, arrays and public data sets."""
