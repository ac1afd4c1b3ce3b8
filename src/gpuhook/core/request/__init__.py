"""A container's request: pure functions of its OCI spec and the configuration."""
