"""The parts of ``scripts/explain-scores``."""
