"""Jobs seen from outside: found by their run directories, read from their files, and stopped."""
