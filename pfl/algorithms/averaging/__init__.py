"""One global model, a mean of what clients send; and its ends: clients alone, pooled samples."""
