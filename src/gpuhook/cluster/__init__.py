"""Kubernetes: the device plugin, the DRA driver, the NRI plugin, and node labels."""
