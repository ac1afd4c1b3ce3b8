"""Vendors' modules for watching devices, and the finder of all modules of vendors for commands."""
