"""What ``scripts/gpu-check`` is made of: which GPU there is, jobs with time limits, the checks, the
table."""
