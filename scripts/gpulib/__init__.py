"""Modules of ``scripts/gpu-check``: which GPU there is, jobs with time limits, the checks, the
table."""
