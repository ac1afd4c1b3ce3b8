"""Intel GPUs: as resources of a cluster."""
