"""Worker output on the user's screen, pipe or file, and our own lines beside it."""
