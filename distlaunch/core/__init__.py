"""Runs on nodes: sent there as a zip. Standard library only."""
