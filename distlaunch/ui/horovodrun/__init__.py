"""Layer ui: the command ``distlaunch horovodrun``, which takes horovodrun's words."""
