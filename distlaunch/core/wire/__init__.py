"""Frames and messages between coordinator and agent, and between agent and spawner; no sockets."""
