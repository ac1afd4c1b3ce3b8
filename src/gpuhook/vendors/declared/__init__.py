"""A vendor that config.toml declares: nodes with a number in their names, and files."""
