"""Starts, watches and stops the workers of one node."""
