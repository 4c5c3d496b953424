"""The command ``distlaunch deepspeed``."""
