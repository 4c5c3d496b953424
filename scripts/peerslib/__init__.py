"""The parts of ``scripts/compare-peers``."""
