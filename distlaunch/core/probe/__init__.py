"""Find out facts about this node: GPUs, CPUs, limits, interfaces."""
