"""The agent's work for its node: survey, ports, reachability, and Horovod's store."""
