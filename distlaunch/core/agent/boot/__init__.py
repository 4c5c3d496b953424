"""Modules that a worker's interpreter runs as it starts.

This directory comes first on PYTHONPATH and is removed from it.
"""
