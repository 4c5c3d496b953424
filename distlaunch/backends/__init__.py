"""What a training framework needs from a launcher: one module each."""
