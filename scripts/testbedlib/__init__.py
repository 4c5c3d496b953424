"""What scripts/testbed is made of: real systems on one machine, in namespaces of their own, gone
without a trace."""
