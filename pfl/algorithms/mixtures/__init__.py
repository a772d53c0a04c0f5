"""A client's model is a mixture of several: its own, the global one, those of other clients."""
