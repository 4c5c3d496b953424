"""What ``scripts/chaos`` is made of: ``processes`` harms jobs of one machine, ``several`` those of
several hosts."""
