"""Intel Gaudi (Habana): as resources of a cluster."""
