"""Backends: the variables, arguments and options that each training framework needs from a
launcher."""
