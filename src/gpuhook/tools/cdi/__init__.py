"""CDI specs: generation and updates by the commands."""
