"""Results for people: a table for the terminal, figures."""
