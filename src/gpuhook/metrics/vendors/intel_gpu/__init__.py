"""Intel GPUs: their measurements."""
