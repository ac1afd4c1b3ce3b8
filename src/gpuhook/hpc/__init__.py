"""Slurm, and devices for root folders, units and machines without a container engine."""
