"""What is measured; a package of its own, as some environments have another of this name."""
