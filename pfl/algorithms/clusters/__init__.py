"""Clients with the same model form groups, which the server finds."""
