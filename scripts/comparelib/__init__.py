"""Modules of ``scripts/compare-torchrun``."""
