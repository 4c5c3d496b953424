"""What travels to a node: standard library only, runnable under ``python -I -S``."""
