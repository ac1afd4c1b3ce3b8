"""The commands for clusters, one per file."""
