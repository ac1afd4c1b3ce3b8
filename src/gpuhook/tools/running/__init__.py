"""Running containers: their devices, their records, and repair."""
