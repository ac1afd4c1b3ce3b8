"""Intel NPUs: as resources of a cluster."""
