"""NVIDIA GPUs: as resources of a cluster."""
