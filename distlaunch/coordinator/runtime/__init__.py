"""The main loop of the coordinator and its parts: agents, connections, output, run directory."""
