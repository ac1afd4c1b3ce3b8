"""AMD GPUs: their measurements."""
