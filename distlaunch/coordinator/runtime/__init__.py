"""The main loop of the coordinator, and the objects that it uses: agents, connections, output, run
directory."""
