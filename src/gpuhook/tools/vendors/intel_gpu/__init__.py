"""Intel's GPUs, for commands."""
