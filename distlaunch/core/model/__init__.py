"""Immutable data that all packages share: the plan, the topology, variables of workers."""
