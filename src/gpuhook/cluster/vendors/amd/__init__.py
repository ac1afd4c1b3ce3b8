"""AMD GPUs: as resources of a cluster."""
