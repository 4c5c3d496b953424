"""Hosts that the user names: host files, host lists, filters, and which host is this one."""
