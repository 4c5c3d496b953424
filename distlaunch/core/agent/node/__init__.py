"""What an agent does for its node: survey, ports, reachability, attempt setup."""
