"""Slurm: what it is to know of this machine's devices, and which of them a job was given.

Nothing here is imported by the runtime or the hook.
"""
