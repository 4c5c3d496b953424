"""Commands that take the options of other launchers: torchrun, accelerate, deepspeed and
horovodrun."""
