"""One launcher per node: admission, the other launchers, and a launcher that joins another."""
