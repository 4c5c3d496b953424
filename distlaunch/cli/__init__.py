"""The command line: parses the words of a command, runs the command, and returns its exit code."""
