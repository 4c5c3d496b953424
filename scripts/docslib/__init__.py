"""Modules of ``scripts/docs``."""
