"""The agent: runs on a node, and starts, watches and stops the workers there."""
