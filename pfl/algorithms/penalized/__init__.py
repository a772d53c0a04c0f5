"""A penalty holds the models of clients to a common one."""
