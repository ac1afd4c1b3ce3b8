"""Vendors that config.toml declares, for commands."""
