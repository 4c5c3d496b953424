"""Systems that name the nodes of a job: Slurm, Kubernetes, MPI, batch systems, clouds."""
