"""Frozen data shared by every layer: ids, topology, plan, worker variables."""
