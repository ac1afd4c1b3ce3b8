"""The configuration: config.toml read into plain data."""
