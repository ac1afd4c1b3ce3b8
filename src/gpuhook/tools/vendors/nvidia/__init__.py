"""NVIDIA's GPUs, for commands: what they do, their links, their simulated driver."""
