"""Messages between processes of one job, their frames, and the handshake between launchers."""
