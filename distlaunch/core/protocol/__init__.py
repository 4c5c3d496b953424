"""Messages, frames and handshakes between launcher, agent and spawner. No sockets."""
