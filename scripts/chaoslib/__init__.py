"""Modules of ``scripts/chaos``: ``processes`` harms jobs of one machine, ``several`` those of
several hosts."""
