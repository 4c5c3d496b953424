"""The coordinator: decides for a job and supervises it."""
