"""Modules that a worker's interpreter runs when it starts.

This directory is the first one on PYTHONPATH. Its ``sitecustomize`` removes it from there.
"""
