"""Agents on other hosts, reached by SSH."""
