"""The loop of the coordinator and what it acts with: agents, connections, output, run directory."""
