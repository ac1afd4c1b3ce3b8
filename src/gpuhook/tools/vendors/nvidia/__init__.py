"""NVIDIA's GPUs, for commands: what they do, and their links."""
