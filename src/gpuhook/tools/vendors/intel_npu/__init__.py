"""Intel NPUs, for commands."""
