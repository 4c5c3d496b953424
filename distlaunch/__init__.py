"""distlaunch: start, watch, explain and restart distributed training jobs."""

__version__ = "0.1.0"
