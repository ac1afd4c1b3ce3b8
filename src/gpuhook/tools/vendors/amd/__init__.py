"""AMD's GPUs, for commands."""
