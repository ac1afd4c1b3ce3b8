"""NVIDIA GPUs, for commands: their activity, and their links."""
