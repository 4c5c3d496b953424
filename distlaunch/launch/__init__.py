"""The composition root: reads the facts, makes the plan, and starts a job.

Each way to start a job has a module: ``run``, ``remote``, ``joined``, ``slurm``, ``ray``.
"""
