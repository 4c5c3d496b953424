"""What each training framework needs from a launcher."""
