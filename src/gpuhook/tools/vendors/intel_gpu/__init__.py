"""Intel GPUs, for commands."""
