"""NVIDIA MPS: management of the control daemon without a cluster."""
