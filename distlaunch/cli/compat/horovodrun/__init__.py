"""The command ``distlaunch horovodrun``."""
