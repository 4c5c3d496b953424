"""Checkpoints of a training script: their content, storage, saving and loading."""
