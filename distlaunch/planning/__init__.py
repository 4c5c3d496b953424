"""From facts to a topology, from a topology to a plan. Pure: the same facts give the same plan."""
