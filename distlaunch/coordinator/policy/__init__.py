"""State machines without I/O that decide for a job: attempts, node setup, restarts, hangs,
signals."""
