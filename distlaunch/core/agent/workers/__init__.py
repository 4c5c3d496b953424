"""Start, watch and stop the workers of a node."""
