"""Slurm: its configuration for this host's devices, and the devices of a job.

Nothing here is imported by the runtime or the hook.
"""
