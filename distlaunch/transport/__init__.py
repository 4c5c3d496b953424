"""How the coordinator reaches an agent: child process, SSH, Slurm, Ray, TCP."""
