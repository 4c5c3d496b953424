"""Layer ui: the command ``distlaunch deepspeed``, which takes the words of DeepSpeed's launcher."""
