"""Processes, programs and namespaces of the host, for commands."""
