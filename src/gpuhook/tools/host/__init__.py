"""Processes, programs and namespaces of the host, as commands look at them."""
