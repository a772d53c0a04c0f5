"""Networks that teach each other: what travels is a common network, or scores of public data."""
