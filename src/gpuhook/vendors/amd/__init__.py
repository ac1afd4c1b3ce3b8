"""AMD GPUs, and their partitions."""
