"""The commands for Slurm and root folders, one per file."""
