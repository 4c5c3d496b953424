"""Agents in a Slurm allocation, started by srun."""
