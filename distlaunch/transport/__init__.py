"""Connections to agents: by child process, SSH, Slurm, Ray or TCP."""
