"""What a container asks for: pure functions of its OCI spec and the configuration."""
