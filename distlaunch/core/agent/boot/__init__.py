"""What workers' interpreters run as they start; this folder comes first on their PYTHONPATH, and leaves it."""
