"""What starts, watches and stops the workers of one node: spawner, output, stacks, warm start."""
