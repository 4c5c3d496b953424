"""What the user sees: options, command line, console."""
