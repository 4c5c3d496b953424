"""From facts to a topology, from a topology to a plan. No I/O: the same facts give the same plan."""
