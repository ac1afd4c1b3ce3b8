"""Commands' changes to the configuration, and its display."""
