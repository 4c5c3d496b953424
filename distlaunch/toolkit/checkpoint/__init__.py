"""Checkpoints of a training script: what is saved, where, and how it is read back."""
