"""The agent: distlaunch's process on a node."""
