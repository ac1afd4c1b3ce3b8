"""Vendors declared in config.toml: nodes with a number in their names, and files."""
