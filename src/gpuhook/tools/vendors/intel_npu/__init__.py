"""Intel's NPUs, for commands."""
