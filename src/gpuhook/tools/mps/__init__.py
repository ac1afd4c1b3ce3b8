"""NVIDIA's MPS: the control daemon, kept without a cluster."""
