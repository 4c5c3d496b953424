"""One launcher per node.

The launcher with rank 0 is the coordinator: it admits the other launchers and decides for the job.
The others are joined launchers, which carry out its decisions on their nodes.
"""
