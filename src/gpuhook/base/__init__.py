"""Base layer: the kernel, the host, files and formats; it knows no vendor."""
