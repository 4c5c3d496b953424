"""Layer ui: the command ``distlaunch accelerate launch``, which takes the words of Accelerate's launcher."""
