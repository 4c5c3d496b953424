"""Names that vulture cannot see in use: called by a protocol, a framework or a user. One reason each."""
