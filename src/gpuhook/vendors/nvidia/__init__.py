"""What is NVIDIA's alone: its variables, its driver's files and nodes, NVML."""
