"""Optimisations of a start: hook worker, prefork server, and the launcher's cache."""
