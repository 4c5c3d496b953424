"""What a node can find out about itself: GPUs, CPUs, limits, interfaces."""
