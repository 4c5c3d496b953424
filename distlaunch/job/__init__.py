"""The coordinator: policy (pure), runner, signals, run directory, transports, diagnosis."""
