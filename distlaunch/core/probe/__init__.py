"""What a node can tell about itself: GPUs, CPUs, NUMA, limits. Reads the machine, starts nothing but nvidia-smi."""
