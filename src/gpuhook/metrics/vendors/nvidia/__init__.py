"""NVIDIA GPUs: their measurements."""
