"""Jobs seen from outside: found, read and stopped by their run directories."""
