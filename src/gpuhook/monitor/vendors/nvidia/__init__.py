"""NVIDIA GPUs: the driver's errors, and links between devices."""
