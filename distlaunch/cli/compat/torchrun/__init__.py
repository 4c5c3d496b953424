"""The command ``distlaunch torchrun``."""
