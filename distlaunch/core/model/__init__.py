"""Frozen data that all rooms share: plan, topology, worker variables."""
