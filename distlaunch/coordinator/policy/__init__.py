"""Pure state machines that decide for a job: attempts, node setup, restarts, hangs, signals."""
