"""AMD GPUs, for commands."""
