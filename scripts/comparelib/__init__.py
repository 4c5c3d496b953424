"""What ``scripts/compare-torchrun`` is made of."""
