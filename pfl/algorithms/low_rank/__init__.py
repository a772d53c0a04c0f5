"""Methods for networks with low-rank adapters (LoRA)."""
