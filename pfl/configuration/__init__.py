"""A configuration of `pfl fit`: its files, the objects that it names, its errors in one line."""
