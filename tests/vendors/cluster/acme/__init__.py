"""ACME's accelerators, for commands."""
