"""What ``scripts/docs`` is made of."""
