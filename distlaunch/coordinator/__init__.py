"""Decides for a job and supervises it."""
