"""The command ``distlaunch accelerate launch``."""
