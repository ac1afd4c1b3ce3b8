"""Configuration: config.toml read into plain data."""
