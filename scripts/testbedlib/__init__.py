"""Modules of ``scripts/testbed``: real systems on one machine, in namespaces of their own, that
leave nothing behind."""
