"""Clients agree on features or on their means by class."""
