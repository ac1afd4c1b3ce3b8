"""AMD's GPUs, and the partitions of those that are partitioned."""
