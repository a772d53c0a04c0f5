"""Which client owns which sample: index arrays, partitions, and numbers that describe them."""
