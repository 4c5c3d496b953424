"""Immutable data that all rooms share: the plan, the topology, variables of workers."""
