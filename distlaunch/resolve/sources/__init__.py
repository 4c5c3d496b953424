"""Where a topology can come from, one module each."""
