"""One part of the model is common, the other is each client's own."""
