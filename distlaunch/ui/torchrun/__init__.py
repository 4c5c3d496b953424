"""Layer ui: the command ``distlaunch torchrun``, which takes torchrun's words."""
