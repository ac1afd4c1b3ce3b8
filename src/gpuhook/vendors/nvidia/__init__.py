"""The vendor NVIDIA: its variables, its driver's files and nodes, NVML."""
