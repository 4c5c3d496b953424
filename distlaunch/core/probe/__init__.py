"""Read the properties that a node can find out about itself: GPUs, CPUs, limits, interfaces."""
