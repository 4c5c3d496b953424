"""Layer toolkit: the worker side, for use in a training script: ``from distlaunch.toolkit import heartbeat``."""

from distlaunch.toolkit.progress import heartbeat

__all__ = ["heartbeat"]
